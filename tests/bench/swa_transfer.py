"""Measures what a cache group of layers with a sliding window saves: bytes of a transfer, and memory of a prompt.

    python -m baton.tests.bench.swa_transfer [--tokens 8192]

The KV layout is gpt-oss-20b's (24 layers, every other with a window of 128 tokens), in host memory over ipc.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import numpy as np

from baton.common.config.server import CacheArgs, DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.common.runner.kv_sizing import page_counts
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.endpoint import FurtherGroup
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender
from baton.tests.kvtransfer.conftest import HOST, Bootstrap, regions_of, shareable, wait_until

WINDOW = 128
ONE_POOL = [KVLayout((24,), 8, 64, 16, "bfloat16", windows=(WINDOW, None) * 12)]
TWO_POOLS = [KVLayout((12,), 8, 64, 16, "bfloat16", windows=(window,) * 12, layers=tuple(range(first, 24, 2)),
                      retained_tokens=window) for first, window in ((1, None), (0, WINDOW))]


def span(layout: KVLayout, tokens: int) -> tuple[int, np.ndarray]:
    """The first page that decode reads after the prompt, and as many page ids as there are from it on."""
    first = layout.first_retained_token(tokens) // layout.page_size
    return first, np.arange(layout.pages_for(tokens) - first)


def transfer(layouts: list[KVLayout], tokens: int, repeats: int = 5) -> tuple[float, float]:
    """Returns the bytes of one prompt's transfer, and the least seconds that one took."""
    spans = [span(layout, tokens) for layout in layouts]
    with contextlib.ExitStack() as stack:
        bootstrap = Bootstrap()
        stack.callback(bootstrap.close)
        ends, memory = [], []
        for build in (KVSender, KVReceiver):
            pools = [shareable(np.ones((len(ids) + 1, layout.page_bytes), np.uint8))
                     for layout, (_, ids) in zip(layouts, spans)]
            memory.append(pools)
            first, *further = [FurtherGroup(layout, len(pool)) for layout, pool in zip(layouts, pools)]
            ends.append(build(args=DisaggregationArgs(disaggregation_transfer_backend="ipc", kv_checksum="off"),
                              host=HOST, rank=0, tp_size=1, layout=first.layout, num_pages=first.num_pages,
                              further=further, regions=regions_of(pools), backend=make_backend("ipc")))
            stack.callback(ends[-1].close)
        sender, receiver = ends
        register_rank(bootstrap.url, sender.info)
        seconds = []
        for room in range(repeats):
            receiver.reserve(room, bootstrap.address, 77, tokens, *spans[0], further=spans[1:])
            sender.expect(room, 77, tokens)
            wait_until(lambda room=room: sender.phase(room) is Phase.RESERVED)
            began = time.perf_counter()
            for group, (first_page, ids) in enumerate(spans):
                sender.push(room, group, first_page, ids, None)
            sender.finish(room, PrefillResult(1, 0))
            wait_until(lambda room=room: receiver.phase(room) is Phase.DONE, timeout=60)
            seconds.append(time.perf_counter() - began)
        return sender.counters["kv_bytes_sent"] / repeats, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    print("| pools | bytes sent | ms | MiB that a decoding prompt keeps | GiB of pools for 1 Mi tokens |")
    print("|---|---|---|---|---|")
    for name, layouts in (("one", ONE_POOL), ("two", TWO_POOLS)):
        sent, seconds = transfer(layouts, tokens)
        kept = sum(len(span(layout, tokens)[1]) * layout.page_bytes for layout in layouts)
        counts = page_counts(CacheArgs(), layouts, (1 << 20) // 16)
        pools = sum(count * layout.page_bytes for count, layout in zip(counts, layouts))
        print(f"| {name} | {sent:.0f} | {1e3 * seconds:.1f} | {kept / 2**20:.1f} | {pools / 2**30:.1f} |")


if __name__ == "__main__":
    main()
