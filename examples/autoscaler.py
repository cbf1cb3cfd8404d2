"""Adds decode workers to a router while they are busy, and drains them while they are idle.

The workers run already (or your platform's API starts them: see ``scale_up``); joining and leaving is one request each.
A drained worker gets no new requests and leaves when its last one has ended, so no stream is cut.

    python examples/autoscaler.py --router http://127.0.0.1:30000 --standby http://10.0.0.3:30002 http://10.0.0.4:30002
"""

import argparse
import json
import os
import time
from urllib.parse import quote
from urllib.request import Request, urlopen


def call(url: str, method: str = "GET") -> dict:
    """The JSON answer; raises HTTPError for a status of 400 or more."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("BATON_ADMIN_KEY")) else {}
    with urlopen(Request(url, headers=headers, method=method), timeout=10) as answer:
        return json.load(answer)


def scale_up(router: str, url: str) -> None:
    """Start the worker here, where it does not run yet; the router waits until it is healthy."""
    call(f"{router}/add_worker?url={quote(url, safe='')}", "POST")
    print(f"added {url}", flush=True)


def scale_down(router: str, url: str) -> None:
    """Stop the worker once it is gone from ``/list_workers``."""
    call(f"{router}/drain_worker?url={quote(url, safe='')}", "POST")
    print(f"drained {url}", flush=True)


def step(args: argparse.Namespace) -> None:
    """One look at the router, and at most one change."""
    decode = [worker for worker in call(f"{args.router}/list_workers")["workers"] if worker["role"] == "decode"]
    joined = {worker["url"] for worker in decode}
    spare = [url for url in args.standby if url not in joined]
    load = sum(worker["load"] for worker in decode) / max(1, len(decode))
    if spare and (len(decode) < args.min_workers or load > args.high):
        scale_up(args.router, spare[0])
    elif len(decode) > args.min_workers and load < args.low:
        removable = [url for url in reversed(args.standby) if url in joined]
        if removable:
            scale_down(args.router, removable[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="http://127.0.0.1:30000")
    parser.add_argument("--standby", nargs="+", required=True, metavar="URL", help="decode workers to add when needed")
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--high", type=float, default=64, help="mean requests per worker above which one is added")
    parser.add_argument("--low", type=float, default=8, help="and below which one is drained")
    parser.add_argument("--interval", type=float, default=5, help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="look once and stop")
    args = parser.parse_args()
    step(args)
    while not args.once:
        time.sleep(args.interval)
        step(args)


if __name__ == "__main__":
    main()
