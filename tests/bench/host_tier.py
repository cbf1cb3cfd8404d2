"""KV pages between GPU and host memory: GB/s both ways, what copies take from a step beside them, and TTFT of a hit.

    python -m baton.tests.bench.host_tier [--tokens 32768] [--out FILE]
    python -m baton.tests.bench.host_tier --tiny      # on a CPU: does the bench itself run?

The model is the 8B-shaped dummy: 128 KiB a token. TTFT is of one prompt with 64 tokens more than are cached: all
computed, the rest in the GPU's prefix cache, and the rest in host memory alone. ``added`` is what the load costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ...common.bench.client.stepped_engine import SteppedEngine
from ...common.config.cli import build
from ...common.config.server import ServerConfig
from ...common.kvcache.layout import KVLayout, split_layers
from ...common.kvcache.pool import KVPool
from ...common.kvcache.tiers import page_copies
from ...common.kvcache.tiers.base import TierContext
from ...common.kvcache.tiers.host import HostTier
from .device_time import run_seconds
from .dummy_engine import TINY
from .relay import LLAMA_8B

PAGE = 16
REST = 64
REPEATS = 5
BACKENDS = ("kernel", "direct")


def rates(io_backend: str, count: int, *, tiny: bool) -> dict[str, float]:
    """Copies of ``count`` scattered pages; GB/s, and how much longer a product takes beside a load."""
    device, heads, layers = ("cpu", 2, 2) if tiny else ("cuda", 8, 32)
    groups = split_layers(layers, 2 * heads * PAGE * 128 * 2)
    layout = KVLayout(groups=groups, num_kv_heads=heads, head_dim=128, page_size=PAGE, dtype="bfloat16")
    pool = KVPool(layout, 2 * count + 1, device)
    began = time.perf_counter()
    tier = HostTier(TierContext(pool, count * layout.page_bytes, "--hicache-size", io_backend=io_backend))
    found = {"pin_gb_s": count * layout.page_bytes / (time.perf_counter() - began) / 1e9}
    order = np.random.default_rng(0).permutation(2 * count)
    keys, pages, targets = [b"%d" % i for i in range(count)], order[:count], order[count:]
    for name in ("store", "load"):
        seconds = []
        for _ in range(REPEATS):
            if name == "store":
                tier.clear()
            began = time.perf_counter()
            if name == "store":
                tier.store(keys, pages).wait()
            else:
                task = tier.load(keys, targets)
                found["launch_ms"] = 1e3 * (time.perf_counter() - began)
                task.wait()
                tier.finish(task)
            seconds.append(time.perf_counter() - began)
            tier.poll()
        found[f"{name}_gb_s"] = count * layout.page_bytes / statistics.median(seconds[1:]) / 1e9
        found[f"{name}_ms"] = 1e3 * statistics.median(seconds[1:])
    if not tiny:
        found |= beside(tier, keys, targets)
    for group, pool_group in enumerate(pool.groups):
        sample = slice(None, None, max(1, count // 64))
        assert torch.equal(pool_group[targets[sample]], pool_group[pages[sample]]), f"group {group} is wrong"
    tier.close()
    return found


def beside(tier: HostTier, keys: list[bytes], pages: np.ndarray) -> dict[str, float]:
    """A product of 4,096 rows, alone and while pages are loaded."""
    x, weight = (torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2))

    def product() -> None:
        for _ in range(20):
            x @ weight

    alone = statistics.median(run_seconds(product, 9)[2:])
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        task = tier.load(keys, pages)
        times += run_seconds(product, 1)
        task.wait()
        tier.finish(task)
    return {"slower_beside_load": statistics.median(times) / alone - 1}


def engine_of(io_backend: str, tokens: int, *, tiny: bool) -> SteppedEngine:
    shape = (TINY if tiny else LLAMA_8B) | {"max_position_embeddings": 2 * tokens}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return SteppedEngine(build(ServerConfig, {
            "model_path": folder, "dtype": "float32" if tiny else "bfloat16", "device": "cpu" if tiny else "cuda",
            "load_format": "dummy", "max_total_tokens": tokens + 4096, "max_running_requests": 4,
            "enable_hierarchical_cache": True, "hicache_ratio": 1.2, "hicache_io_backend": io_backend}))


def ttft(io_backend: str, tokens: int, *, tiny: bool) -> dict[str, float]:
    """Milliseconds: ``computed``, ``gpu_hit``, ``host_hit`` and what the last one adds to the second."""
    engine = engine_of(io_backend, tokens, tiny=tiny)
    cache, tier = engine._parts.batcher.cache, engine._parts.batcher.cache.tier
    assert isinstance(tier, HostTier)
    while tier.capacity < tier.memory.num_slots:
        engine.step()
    vocab = engine._parts.runner.spec.vocab_size
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, vocab, tokens).tolist()

    def ask() -> float:
        own = draw.integers(0, vocab, REST).tolist()
        engine.synchronize()
        began = time.perf_counter()
        engine._add([*prompt, *own], 1)
        while not engine.idle:
            engine.step()
        return 1e3 * (time.perf_counter() - began)

    def evict() -> None:
        engine.step()  # what was computed is copied
        cache._evict(cache.num_cached)
        assert cache.num_cached == 0
        engine.step()

    ask()
    cache.flush()
    found = {"computed": ask()}
    found["gpu_hit"] = statistics.median(ask() for _ in range(REPEATS))
    host = []
    for _ in range(REPEATS + 1):
        evict()
        loaded = tier.counters.loaded
        host.append(ask())
        assert tier.counters.loaded - loaded >= tokens // PAGE, "the prompt was computed"
    found["host_hit"] = statistics.median(host[1:])
    found["added"] = found["host_hit"] - found["gpu_hit"]
    tier.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokens = min(args.tokens, 512) if args.tiny else args.tokens
    rows: dict[str, dict[str, float]] = {}
    for name in args.backends:
        rows[f"copies, {name}"] = rates(name, tokens // PAGE, tiny=args.tiny)
        torch.cuda.empty_cache()
    own = page_copies.PROGRAMS
    for page_copies.PROGRAMS in (8, 32, 64) if "kernel" in args.backends else ():
        rows[f"{page_copies.PROGRAMS} programs"] = rates("kernel", tokens // PAGE, tiny=args.tiny)
        torch.cuda.empty_cache()
    page_copies.PROGRAMS = own
    for name in args.backends[:1] if args.tiny else args.backends:
        rows[f"TTFT ms, {name}"] = ttft(name, tokens, tiny=args.tiny)
        torch.cuda.empty_cache()
    for title, row in rows.items():
        print(f"{title:16}", ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    if args.out:
        device = "cpu" if args.tiny else torch.cuda.get_device_name()
        args.out.write_text(json.dumps({"device": device, "tokens": tokens, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
