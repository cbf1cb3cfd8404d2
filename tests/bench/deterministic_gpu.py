"""Deterministic mode on a GPU: that its answers have the same bits however they are computed, and what it costs.

    python -m baton.tests.bench.deterministic_gpu [--only bits,cost] [--models llama,fp8,latents] [--device cuda]

Bits: requests of lengths from 3 to 1,500 tokens are answered 200 at once, one by one, in batches of other sizes, in
chunks, without CUDA graphs, and with drafts; tokens and log-probabilities must be equal to the last bit. Models are
dummy ones of a few layers of an 8B shape, in bf16 and float8 (weights and KV), and of DeepSeek-V2-Lite's. Cost: TPOT of
one request, throughput of 64 and prefill of 4,096 tokens of the whole 8B shape, with the mode and without. Every engine
runs in a process of its own. Exits with 1 where bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .dummy_engine import TINY
from .mla_decode import V2_LITE
from .relay import LLAMA_8B

FLAG = "--enable-deterministic-inference"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_8B | {"num_hidden_layers": 4}, "fp8": LLAMA_8B | {"num_hidden_layers": 4},
    "latents": V2_LITE | {"num_hidden_layers": 4}, "tiny": TINY}
MODEL_FLAGS = {"fp8": ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")}
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4",
         "--speculative-ngram-min-match-window-size", "1")
ENGINES: dict[str, tuple[str, ...]] = {
    "graphs": (), "chunks of 512": ("--chunked-prefill-size", "512"),
    "mixed chunks": ("--chunked-prefill-size", "512", "--enable-mixed-chunk"),
    "eager": ("--disable-cuda-graph",), "drafts": NGRAM}
REQUESTS, NEW_TOKENS = 200, 24
BATCHES = (1, 2, 16, 33, 64)
"""Sizes in which the first engine answers the first of the requests again."""
GOALS = {"TPOT of 1 request": 0.08, "throughput of 64": 0.10, "prefill of 4096": 0.10}


def questions(vocab: int) -> list[Any]:
    """Prompts of all lengths, some of which repeat their tokens, so that drafts are found and accepted."""
    from baton.common.api.sampling import SamplingParams
    from baton.tests.helpers.flag_engine import Question
    rng, made = random.Random(0), []
    for number in range(REQUESTS):
        length = rng.choice((3, 17, 64, 100, 257, 700, 1500))
        tokens = rng.choices(range(3, vocab), k=length)
        if number % 2:
            tokens = (tokens[:9] * length)[:length]
        sampling = {"temperature": 0.0} if number % 3 else {"temperature": 0.8, "seed": number}
        made.append(Question(tokens, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **sampling),
                             fields={"return_logprob": True}))
    return made


def answer(model: str, name: str, device: str, folder: Path, out: Path) -> None:
    """Runs in a process of its own: writes every request's tokens and log-probabilities, by batch size."""
    from baton.tests.helpers.flag_engine import FlagEngine
    shape = json.loads((folder / "config.json").read_text())
    engine = FlagEngine("--model-path", str(folder), "--load-format", "dummy", "--device",
                        device, FLAG, "--dtype", "bfloat16" if device == "cuda" else "float32", "--max-total-tokens",
                        "300000", "--max-running-requests", "256", *MODEL_FLAGS.get(model, ()), *ENGINES[name])
    asked, found = questions(shape["vocab_size"]), {}
    for size in (REQUESTS, *(BATCHES if name == "graphs" else ())):
        begun, chosen = time.monotonic(), asked if size == REQUESTS else asked[:max(size, 8)]
        answers = [answer for start in range(0, len(chosen), size)
                   for answer in engine.answers(chosen[start:start + size])]
        drafted = sum(drafts for answer in answers for _, drafts, _ in answer.verified)
        found[str(size)] = {"answers": [[answer.tokens, answer.logprobs] for answer in answers], "drafts": drafted,
                            "steps": sum(len(answer.lengths) for answer in answers),
                            "seconds": time.monotonic() - begun}
    out.write_text(json.dumps(found))


def cost(device: str, folder: Path, deterministic: bool, out: Path) -> None:
    """Runs in a process of its own: writes the figures of ``GOALS``, as seconds."""
    from baton.common.bench.client.stepped_engine import SteppedEngine
    from baton.common.bench.one_batch import once
    from baton.common.config.cli import parse
    from baton.common.config.server import ServerConfig
    from baton.common.garbage_collector import freeze_collector
    from baton.kernels.tuning.policy import set_batch_invariant
    flags = [FLAG] if deterministic else []
    set_batch_invariant(deterministic)
    engine = SteppedEngine(parse(ServerConfig, [
        "--model-path", str(folder), "--load-format", "dummy", "--device", device, "--dtype",
        "bfloat16" if device == "cuda" else "float32", "--max-total-tokens", "160000", "--max-running-requests", "64",
        "--disable-radix-cache", *flags], prog="engine", description=""))
    freeze_collector()
    for batch, given, made in ((1, 1024, 8), (64, 1024, 8), (1, 4096, 1)):
        once(engine, batch, given, made)
    one = once(engine, 1, 1024, 200)
    many = min((once(engine, 64, 1024, 256) for _ in range(2)), key=lambda run: run.total)
    prompts = [once(engine, 1, 4096, 1).prefill for _ in range(8)]
    out.write_text(json.dumps({
        "TPOT of 1 request": statistics.median(one.steps[10:]), "throughput of 64": many.total,
        "prefill of 4096": statistics.median(prompts), "step of 64": statistics.median(many.steps[10:]),
        "prefill of 64 x 1024": many.prefill}))


def in_process(what: Sequence[str], out: Path, seconds: float) -> Any:
    """What such a process wrote; None where it failed."""
    try:
        done = subprocess.run([sys.executable, "-m", "baton.tests.bench.deterministic_gpu", *what, "--out", str(out)],
                              capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"  {what}: took over {seconds:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"  {what}: {done.stdout[-600:]}{done.stderr[-1500:]}", flush=True)
        return None
    return json.loads(out.read_text())


def compare(model: str, device: str, engines: Sequence[str], seconds: float) -> bool:
    """Prints how many answers of each engine differ; True where none does."""
    equal, expected = True, None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        for engine in engines:
            made = in_process(("--answer", model, engine, name, "--device", device), folder / "out.json", seconds)
            if made is None:
                equal = False
                continue
            for size, each in made.items():
                answers = each["answers"]
                expected = expected or answers
                wrong = [i for i, (one, other) in enumerate(zip(answers, expected)) if one != other]
                tokens = sum(answers[i][0] != expected[i][0] for i in wrong)
                digest = hashlib.sha1(json.dumps(answers).encode()).hexdigest()[:8]
                print(f"{model:8} {engine:14} batches of {size:>3}: {len(wrong)} of {len(answers)} differ ({tokens} in "
                      f"tokens) {wrong[:6]}, {each['drafts']} drafts, {each['steps']} steps, {each['seconds']:.1f} s, "
                      f"{digest}", flush=True)
                equal = equal and not wrong
    return equal


def measure_cost(device: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B if device == "cuda" else TINY))
        plain, fixed = (in_process(("--cost", name, mode, "--device", device), folder / f"{mode}.json", seconds)
                        for mode in ("plain", "deterministic"))
    if plain is None or fixed is None:
        return
    for what, before in plain.items():
        goal = f"goal {GOALS[what]:.0%}" if what in GOALS else ""
        print(f"{what:22} {1e3 * before:9.2f} ms, deterministic {1e3 * fixed[what]:9.2f} ms: "
              f"{fixed[what] / before - 1:+.1%} {goal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bits,cost")
    parser.add_argument("--models", default="llama,fp8,latents")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150, help="of one process")
    parser.add_argument("--answer", nargs=3, metavar=("MODEL", "ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--cost", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.answer:
        answer(args.answer[0], args.answer[1], args.device, Path(args.answer[2]), args.out)
    elif args.cost:
        cost(args.device, Path(args.cost[0]), args.cost[1] == "deterministic", args.out)
    else:
        if "cost" in args.only:
            measure_cost(args.device, args.seconds)
        equal = [compare(model, args.device, args.engines.split(","), args.seconds)
                 for model in args.models.split(",") if "bits" in args.only]
        sys.exit(not all(equal))


if __name__ == "__main__":
    main()
