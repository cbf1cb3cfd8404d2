"""A decode step on a CPU as it is, and compiled by torch.compile: ``python -m baton.tests.bench.torch_compile``.

Says into how many graphs torch cuts the step, and why, and the best time of a step of each size with each backend,
with the seconds until it was compiled.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch
from baton.common.forward.step_context import StepContext
from baton.common.runner.model_runner import ModelRunner
from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.small_models import load_runner, server_config

CONTEXT = 40
PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=str(CHECKPOINT))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runner = load_runner(server_config(args.model_path, max_total_tokens=8192, dtype="float32", page_size=PAGE))
    forward = runner._model.forward
    print("as it is:", {size: f"{1e3 * best(runner, forward, size, args.steps):.2f} ms" for size in args.batch_sizes})
    with torch.inference_mode():
        explained = torch._dynamo.explain(forward)(runner.plan(batch(runner, 4)))
    reasons = Counter(str(each.reason).splitlines()[0] for each in explained.break_reasons)
    print(f"{explained.graph_count} graphs, {explained.graph_break_count} breaks, most often: {reasons.most_common(1)}")
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend=backend, dynamic=False)
        for size in args.batch_sizes:
            begin = time.perf_counter()
            best(runner, compiled, size, 1)
            seconds = time.perf_counter() - begin
            print(f"{backend}, {size} requests: {1e3 * best(runner, compiled, size, args.steps):.2f} ms, compiled in "
                  f"{seconds:.0f} s")


def batch(runner: ModelRunner, size: int) -> ForwardBatch:
    """A decode step of ``size`` requests."""
    pages = np.arange(-(-(CONTEXT + 1) // PAGE))
    return build_forward_batch([Row([5 + i], CONTEXT, pages + len(pages) * i) for i in range(size)], PAGE,
                               runner.device)


def best(runner: ModelRunner, forward: Callable[[StepContext], torch.Tensor], size: int, steps: int) -> float:
    """The fewest seconds of a step."""
    times = []
    with torch.inference_mode():
        for _ in range(steps):
            step = runner.plan(batch(runner, size))
            begin = time.perf_counter()
            forward(step)
            times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
