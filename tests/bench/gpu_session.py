"""Everything that needs GPUs, in one go: the tests, then the measurements, each in a process of its own.

    python3 -m baton.tests.bench.gpu_session one --seconds 560 --out "$OUT"     # what one GPU can tell
    python3 -m baton.tests.bench.gpu_session two --seconds 560 --out "$OUT"     # transfers, collectives
    python3 -m baton.tests.bench.gpu_session one --only moe,fp8                 # steps by part of their names
    python3 -m baton.tests.bench.gpu_session one --list

Tests come first, several beside each other (they measure nothing); what measures has the machine alone.
Every step's output goes to ``OUT/<step>.log``, what it measured to ``OUT/<step>.json`` where it can write that. A step
that fails or runs out of its time ends alone. Steps stand in order of what is missed most; those for which no time is
left are named. The last lines are the table: step, outcome, seconds, and the end of what it printed.
Exit status 1 where a step failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
PYTEST = ["-m", "pytest", "-q", "-W", "ignore", "--maxfail", "4", "-p", "no:cacheprovider", "-o", "addopts=",
          "--import-mode=importlib"]
LEAST_SECONDS = 20.0
"""A step is not begun with less."""
AT_ONCE = 7
"""Tests beside each other, most of which compile; each that is one more makes all others on the GPU slower."""


class Step(NamedTuple):
    name: str
    argv: list[str]
    seconds: float
    """The most that it may take."""
    tail: int = 6
    """Lines of its output for the table."""
    alone: bool = True


def _file_of(name: str) -> Path:
    [path] = (TESTS / "gpu").rglob(f"test_{name.replace('-', '_')}.py")
    return path


def tests(name: str, seconds: float, alone: bool = False) -> Step:
    return Step(f"test-{name}", [*PYTEST, str(_file_of(name))], seconds, 1, alone)


def parts(name: str, seconds: float, *words: str, alone: bool = False) -> list[Step]:
    """A file's tests beside each other: those that each of ``words`` (pytest's ``-k``) is the first to match, and the
    rest."""
    made, whole = [], tests(name, seconds, alone)
    for number, word in enumerate([*words, ""]):
        said = [f"({word})"] if word else []
        said += [f"not ({earlier})" for earlier in words[:number]]
        made.append(whole._replace(name=f"{whole.name}-{number + 1}", argv=[*whole.argv, "-k", " and ".join(said)]))
    return made


def bench(module: str, seconds: float, *argv: str, name: str = "", json: str = "", tail: int = 12) -> Step:
    """``json``: the flag that names the file to write."""
    step = name or module
    wanted = [json, f"{{out}}/{step}.json"] if json else []
    return Step(step, ["-m", f"baton.tests.bench.{module}", *argv, *wanted], seconds, tail)


def weight_updates(source: str, *argv: str) -> Step:
    """16 GB from the GPU that serves, from its host, or over NCCL from another GPU."""
    filled = "-filled" if "--fill-gpu" in argv else ""
    return bench("weight_updates", 120, "--model", "llama-8b", "--device", "cuda", "--source", source, *argv,
                 name=f"weight_updates-{source}{filled}", tail=4)


PLANS: dict[str, list[Step]] = {
    "one": [
        # What takes FlashInfer two minutes to compile comes first.
        *parts("attention", 240, "flashinfer and 64", "flashinfer"),
        *parts("fp8", 240, "chat_model", "flashinfer", "8b"),
        *parts("engine", 240, "flashinfer_decodes", "plain_loop and overlap", "plain_loop"),
        *parts("gpt-oss", 240, "with_windows", "flashinfer", "twins"),
        *parts("kernels", 240, "kernel_cases", "small_m_cases", "fp8_cases", "verify_cases", "chain_cases"),
        *parts("mla", 240, "twins", "flashinfer"), *parts("moe", 240, "twin"), *parts("models", 240, "flashinfer"),
        *parts("speculation", 240, "mixed and EAGLE3", "mixed", "float8"),
        tests("steps-in-flight", 120), tests("int8-format", 240), tests("packed-ints", 240), tests("user-family", 120),
        tests("states", 240),
        tests("transformers-code", 180), tests("families", 240),
        tests("kv-ipc", 120), tests("shared-tensors", 120), tests("grammar", 240), tests("scheduling", 240),
        tests("prefill-graphs", 120), tests("chain-graphs", 120), tests("invariant-products", 120),
        tests("fixed-splits", 120), tests("offload", 180), tests("layerwise-markers", 120),
        tests("routed-experts", 120),
        tests("all-reduce", 240), tests("small-m-matmul", 120), tests("dense-warp-specialized", 120),
        tests("split-k-warp-specialized", 120), tests("models-sampler", 240), tests("gather-scatter-norm", 120),
        tests("decode-warp-specialized", 120), tests("mla-verify-warp-specialized", 120),
        tests("batched-splits", 120),
        tests("all-to-all", 120), tests("batch-sizes", 180), tests("hidden-states", 120), tests("other-weights", 120),
        tests("long-contexts", 120), tests("host-tier", 180), *parts("double-sparsity", 180, "faster")[1:],
        *parts("double-sparsity", 60, "faster", alone=True)[:1],
        tests("one-batch", 90, alone=True), tests("memory-occupation", 90, alone=True),
        bench("decode_step", 120, json="--out"), bench("transformers_code", 120, json="--out", tail=11),
        bench("state_kernels", 60, json="--out", tail=20), bench("family_speed", 120, json="--out", tail=5),
        bench("speculation_speed", 180, json="--out", tail=10),
        bench("relay", 240, "--skip-chat", "--only", "unified", json="--out", tail=16),
        bench("small_model", 60, json="--out"), bench("prefix_cache", 150, json="--out"), bench("grammar", 120),
        bench("prefill_layer", 60, json="--out", tail=5),
        bench("paged_decode", 60, json="--out", tail=20), bench("double_sparsity", 90, json="--out", tail=16),
        bench("small_m_matmul", 60, json="--output", tail=50), bench("windows", 60, tail=20),
        bench("packed_int_gemm", 90, json="--output", tail=48),
        bench("fp8_gemm", 60, json="--output", tail=24), bench("fp8_serving", 90, json="--out", tail=6),
        bench("quantized_serving", 240, json="--out", tail=9),
        bench("grouped_gemm", 90, json="--output", tail=30), bench("mla_decode", 90, json="--out", tail=24),
        bench("host_tier", 180, json="--out", tail=8), bench("tier_cost", 180, json="--out", tail=4),
        weight_updates("gpu-handles", "--rounds", "3"), weight_updates("host-handles", "--rounds", "2"),
        weight_updates("host-handles", "--rounds", "2", "--fill-gpu"),
        bench("tune_moe", 300),
    ],
    "two": [
        *parts("dp", 150, "two_groups", "written"),
        *parts("four-ranks", 150, "expert_parallel", "each_other", "groups and 2", "groups"),
        *parts("moe", 150, "two_gpus")[:1], tests("tensor-parallel", 150), tests("pipeline", 150), tests("relay", 200),
        tests("all-to-all", 150), tests("dead-rank", 150, alone=True), tests("kv-ipc", 120, alone=True),
        tests("shared-tensors", 120), tests("update-group", 120),
        weight_updates("group", "--rounds", "2"),
        bench("copy_blocks", 60, json="--out", tail=34), bench("transfer_exposed", 150, json="--out", tail=26),
        bench("all_reduce", 60, json="--out", tail=16), bench("token_exchange", 60, json="--out"),
        bench("decode_tp", 120, json="--out"), bench("pipeline", 120, json="--out"),
        bench("many_gpus", 120, "--layers", "16", "--seconds", "100", json="--out", tail=30),
        bench("relay", 300, "--only", "1P1D", "--open-loop", json="--out", tail=16),
        bench("relay_speculation", 240, json="--out", tail=6),
    ],
}


async def run(step: Step, out: Path, end: float) -> tuple[list[str], bool]:
    """Its lines of the table, and whether it failed."""
    began = time.monotonic()
    if end - began < LEAST_SECONDS:
        return [f"== {step.name}: not begun, no time left"], False
    log = out / f"{step.name}.log"
    argv = [sys.executable, *(word.format(out=out) for word in step.argv)]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*argv, stdout=file, stderr=file, start_new_session=True)
        try:
            code = await asyncio.wait_for(process.wait(), min(step.seconds, end - began))
            outcome = "ok" if code == 0 else f"exit {code}"
        except TimeoutError:
            killer = await asyncio.create_subprocess_exec("pkill", "-KILL", "-s", str(process.pid))  # its own session
            await asyncio.gather(killer.wait(), process.wait())
            outcome = "out of time"
    seconds = time.monotonic() - began
    print(f"{step.name:24} {outcome:12} {seconds:6.1f} s", flush=True)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    tail = lines[-step.tail if outcome == "ok" else -25:]
    return [f"== {step.name}: {outcome}, {seconds:.1f} s", *("   " + line[:160] for line in tail)], outcome != "ok"


async def session(steps: list[Step], out: Path, end: float) -> list[tuple[list[str], bool]]:
    """First the steps that may run beside others, then one after the other."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def beside(step: Step) -> tuple[list[str], bool]:
        async with slots:
            return await run(step, out, end)

    told = list(await asyncio.gather(*(beside(step) for step in steps if not step.alone)))
    return told + [await run(step, out, end) for step in steps if step.alone]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu-session"))
    parser.add_argument("--only", default="", help="parts of step names, with commas between them")
    parser.add_argument("--list", action="store_true", help="name the steps, run none")
    args = parser.parse_args()
    wanted = [part for part in args.only.split(",") if part]
    steps = [step for step in PLANS[args.plan] if not wanted or any(part in step.name for part in wanted)]
    if args.list:
        print("\n".join(f"{step.name:24} at most {step.seconds:g} s" for step in steps))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    told = asyncio.run(session(steps, args.out, end))
    print("\n".join(["", *(line for lines, _ in told for line in lines)]))
    sys.exit(any(failed for _, failed in told))


if __name__ == "__main__":
    main()
