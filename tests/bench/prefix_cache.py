"""What the prefix cache saves: groups of prompts that begin alike, with the cache on and with it off.

    python -m baton.tests.bench.prefix_cache [--groups 64] [--prompts 16] [--concurrency 32] [--out FILE]

The model is the 8B-shaped dummy. ``hit rate`` is the cached share of the tokens that a cache can hold: those which an
earlier prompt of the group began with.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
from pathlib import Path

from ...common.bench.report.figures import figures
from ...common.bench.workloads.dataset_args import DatasetArgs
from . import load
from .relay import dummy_flags, unified


def measure(flags: list[str], logs: Path, data: DatasetArgs, concurrency: int) -> dict[str, float | int]:
    with unified(flags, logs) as url:
        asyncio.run(load.run(url, load.Workload(512, 8, 8, 8)))  # warm-up
        answered = asyncio.run(load.ask(url, data, concurrency=concurrency))
    found = figures(answered.answers, answered.duration)
    again = data.gsp_num_groups * (data.gsp_prompts_per_group - 1) * data.gsp_system_prompt_len
    return {"failed": found.num_failed + found.short, "req_s": found.rate(found.completed),
            "hit_rate": (found.cached or 0) / again, "cached_share": found.hit_rate or 0.0,
            "ttft_p50": found.ttft.p50, "ttft_p99": found.ttft.p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--own", type=int, default=128)
    parser.add_argument("--output", type=int, default=1, help="output tokens of each")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--model-path", help="another model than the dummy, e.g. tinychat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = DatasetArgs(dataset_name="generated-shared-prefix", gsp_num_groups=args.groups,
                       gsp_prompts_per_group=args.prompts, gsp_system_prompt_len=args.shared,
                       gsp_question_len=args.own, gsp_output_len=args.output)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model-path", args.model_path] if args.model_path else dummy_flags(Path(folder))
        for name, more in (("on", []), ("off", ["--disable-radix-cache"])):
            row = measure([*flags, *more], Path(folder), data, args.concurrency)
            rows.append({"cache": name, **row})
            print(rows[-1], flush=True)
    print("| cache | failed | req/s | hit rate | cached share of all | TTFT p50 ms | p99 ms |\n" + "|---" * 7 + "|")
    for row in rows:
        print(f"| {row['cache']} | {row['failed']} | {row['req_s']:.1f} | {row['hit_rate']:.3f} | "
              f"{row['cached_share']:.3f} | {row['ttft_p50']:.1f} | {row['ttft_p99']:.1f} |")
    print(f"TTFT p50 off / on: {rows[1]['ttft_p50'] / rows[0]['ttft_p50']:.1f}")
    if args.out:
        args.out.write_text(json.dumps({"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv),
                                        "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
