"""Decode throughput with and without a grammar, in one process, and what a mask costs.

    python -m baton.tests.bench.grammar [--batch 32] [--steps 100] [--context 512]

On a GPU an 8B-shaped dummy model decodes with overlapped scheduling, on a CPU the shipped chat model without; every
request writes a JSON array of objects that is too long to end. Before that, the masks of a vocabulary of 128,256
tokens, made of the words of Python's library, along one answer: compiling, and microseconds a row to fill.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar

from ...common.api.grammar import GrammarSpec, Vocabulary
from ...common.api.messages import Generate
from ...common.api.sampling import SamplingParams
from ...common.config.cli import build
from ...common.config.server import ServerConfig
from ...common.distributed.parallel import Parallel
from ...common.grammar.xgrammar_compiler import Compiler
from ...common.models.registry import load_model_spec
from ...common.runner.model_runner import ModelRunner
from ..helpers.grammar_engine import GrammarEngine
from .relay import LLAMA_8B

LARGE = 128_256
_ITEM = {"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["old", "new", "lost"]}, "minItems": 1, "maxItems": 3},
    "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["name", "age", "tags", "zip"]}
ENDLESS = GrammarSpec("json_schema", json.dumps({"type": "array", "items": _ITEM, "minItems": 500}))
ANSWER = json.dumps([{"name": "Ada Lovelace of London", "age": 36, "tags": ["old"], "zip": "12345"}] * 3)[:-1]


def large_vocabulary(stop_id: int) -> Vocabulary:
    """Bytes, numbers, and the words of the standard library with what they begin with, the most frequent first."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(Path(torch.__path__[0]).rglob("*.py")):
        counts.update(re.findall(r" ?[A-Za-z_]+|\s+|[^\sA-Za-z_0-9]+", path.read_text(errors="ignore")))
    for word, count in list(counts.items()):
        for length in range(2, min(len(word), 10)):
            counts[word[:length]] += count
    pieces = [bytes([byte]) for byte in range(256)] + [b"%d" % number for number in range(10, 1000)]
    known = set(pieces)
    for word, _ in counts.most_common():
        piece = word.encode()
        if len(pieces) == LARGE - 1:
            break
        if piece not in known and len(piece) < 40:
            known.add(piece)
            pieces.append(piece)
    pieces += [b""] * (LARGE - len(pieces))
    pieces[stop_id] = b""
    return Vocabulary(pieces, [stop_id], [stop_id])


def make_engine(batch: int, tokens: int) -> GrammarEngine:
    if not torch.cuda.is_available():
        return GrammarEngine(max_total_tokens=batch * (tokens + 64), max_running=batch)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        config = build(ServerConfig, {
            "model_path": folder, "dtype": "bfloat16", "load_format": "dummy", "cuda_graph_max_bs": batch,
            "max_total_tokens": batch * (tokens + 64), "max_running_requests": batch})
        spec = load_model_spec(config.model)
        runner = ModelRunner.load(config, spec, Parallel(), "cuda", lambda what, share: None)
    stop_id = spec.eos_token_ids[0] if spec.eos_token_ids else LARGE - 1
    return GrammarEngine(overlap=True, max_total_tokens=batch * (tokens + 64), max_running=batch, runner=runner,
                         tokens=large_vocabulary(stop_id))


def throughput(engine: GrammarEngine, grammar: GrammarSpec | None, batch: int, steps: int, context: int) -> float:
    """Output tokens a second of decode steps at full batch."""
    for i in range(batch):
        params = SamplingParams(temperature=1.0, seed=i, max_new_tokens=steps + 20, ignore_eos=True, grammar=grammar)
        message = Generate(f"{i}", [(7 * i + j) % 4000 + 3 for j in range(context)], params)
        req = engine.tracker.accept(message, now=float(i))
        assert req is not None, engine.sent
        req.matcher = engine.store.matcher(req, context) if grammar else None
        engine.scheduler.add(req)
    scheduler = engine.scheduler
    while scheduler.batcher.waiting or scheduler.batcher.prefilling:
        scheduler.step(0.0)
    for _ in range(5):
        scheduler.step(0.0)
    began = time.perf_counter()
    for _ in range(steps):
        scheduler.step(0.0)
        engine.tracker.flush()
    elapsed = time.perf_counter() - began
    assert scheduler.num_running == batch, "a request ended while it was timed"
    engine.run()
    engine.cache.flush()
    return batch * steps / elapsed


def mask_costs() -> dict[str, Any]:
    """Of the large vocabulary: milliseconds to compile, and microseconds a row to fill along ``ANSWER``."""
    vocabulary = large_vocabulary(LARGE - 1)
    compiler = Compiler(vocabulary, None)
    compiler.compile(GrammarSpec("regex", "x"))  # the tokens are sorted with the first
    began = time.perf_counter()
    matcher = xgrammar.GrammarMatcher(compiler.compile(ENDLESS))
    compiled = time.perf_counter() - began
    ids = {piece: i for i, piece in enumerate(vocabulary.token_bytes)}
    mask, fills, rest = np.zeros((1, LARGE // 32), np.int32), [], ANSWER.encode()
    while rest:
        began = time.perf_counter()
        matcher.fill_next_token_bitmask(mask)
        fills.append(1e6 * (time.perf_counter() - began))
        piece = next(rest[:n] for n in range(12, 0, -1) if rest[:n] in ids and mask[0, ids[rest[:n]] // 32]
                     >> ids[rest[:n]] % 32 & 1)
        assert matcher.accept_token(ids[piece])
        rest = rest[len(piece):]
    return {"compile_ms": 1e3 * compiled, "rows": len(fills), "fill_us_mean": float(np.mean(fills)),
            "fill_us_p50": float(np.median(fills)), "fill_us_max": max(fills)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()
    print({name: round(value, 1) for name, value in mask_costs().items()}, flush=True)
    engine = make_engine(args.batch, args.context + args.steps + 20)
    measured: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(4):  # the first warms up
        for name, grammar in (("without", None), ("with", ENDLESS)):
            found = throughput(engine, grammar, args.batch, args.steps, args.context)
            if turn:
                measured[name].append(found)
    medians = {name: float(np.median(values)) for name, values in measured.items()}
    print(f"batch {args.batch}: {medians['without']:.0f} tok/s without, {medians['with']:.0f} tok/s with a grammar, "
          f"ratio {medians['with'] / medians['without']:.3f}")


if __name__ == "__main__":
    main()
