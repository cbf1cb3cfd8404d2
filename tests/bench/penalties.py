"""Host time that penalties cost a decode step, and what rows without any cost, on a CPU.

    python -m baton.tests.bench.penalties [--rows 256] [--tokens 1000] [--vocab 128256]

Each row has an output of so many tokens behind a prompt of as many; every step appends one to each. ``host`` is what
the host does whatever the device: counting the new tokens and joining the batch's (id, count) pairs. ``all`` includes
the gathers and scatters, which a GPU would run. ``plain`` is a step's choices for rows without penalties or bias. Times
are this thread's own, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from ...common.api.sampling import SamplingParams
from ...common.forward.host_copies import upload_joined
from ...common.request.sampling_metadata import SamplingMetadata
from ...common.request.token_buffer import TokenBuffer
from ...common.request.token_history import TokenHistory
from ...common.sampling.extras.penalties import Penalties, apply_penalties
from ...common.sampling.sampler import Sampler


def median_ms(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return 1e3 * float(np.median(times))


class Rows:
    """``count`` requests with ``tokens`` random tokens of output, behind a prompt of as many."""

    def __init__(self, count: int, tokens: int, vocab: int, params: SamplingParams):
        self._rng = np.random.default_rng(0)
        self._vocab = vocab
        self._params = params
        self.buffers = [TokenBuffer(self._draw(tokens)) for _ in range(count)]
        self.histories = [TokenHistory(buffer, tokens) for buffer in self.buffers]
        for buffer in self.buffers:
            for token in self._draw(tokens):
                buffer.append(token)

    def _draw(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab, count).tolist()

    def grow(self) -> None:
        for buffer, token in zip(self.buffers, self._draw(len(self.buffers))):
            buffer.append(token)

    def choosing(self) -> list[tuple[int, Penalties]]:
        return [(row, Penalties(self._params, history)) for row, history in enumerate(self.histories)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    logits = torch.randn(args.rows, args.vocab)
    for name, params in (("frequency", SamplingParams(temperature=0, frequency_penalty=0.5)),
                         ("repetition", SamplingParams(temperature=0, repetition_penalty=1.2))):
        rows = Rows(args.rows, args.tokens, args.vocab, params)
        for history in rows.histories:
            history.advance()
            history.prompt_ids(device)

        def host(rows: Rows = rows) -> None:
            rows.grow()
            for history in rows.histories:
                history.advance()
            upload_joined([history.ids for history in rows.histories], torch.int32, device)
            upload_joined([history.counts for history in rows.histories], torch.int32, device)

        def everything(rows: Rows = rows) -> None:
            rows.grow()
            apply_penalties(logits, rows.choosing(), None)

        growing = median_ms(rows.grow, args.steps)
        print(f"{name}: host {median_ms(host, args.steps) - growing:.2f} ms, "
              f"all {median_ms(everything, args.steps) - growing:.2f} ms a step")
    few = torch.zeros(args.rows, 64)
    sampler, plain = Sampler(64, device, 0), SamplingParams(temperature=0)
    took = median_ms(lambda: sampler.launch(few, [SamplingMetadata(plain, i) for i in range(args.rows)]),
                     10 * args.steps)
    print(f"plain: {took:.3f} ms a step (vocabulary of 64: all of it is the host's)")


if __name__ == "__main__":
    main()
