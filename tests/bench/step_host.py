"""Host time of a decode step: the engine's own work, over a model that costs nothing, on a CPU.

    python -m baton.tests.bench.step_host [--batches 1,16,64,256] [--context 2048] [--profile]

Scheduling, building the batch, choosing (greedy, over a vocabulary of 32), taking in the results of the step before
and telling the front, with steps overlapped as on a GPU; ``encode`` is the message to the front as bytes. Medians of
this thread's time, as milliseconds and as microseconds a request. ``--sampled`` lets every request draw with top-p,
``--changing`` ends requests and sends new ones, so that prefill and decode steps take turns. ``--life`` tells the mean
over all steps of a batch that begins together and ends after so many: turns of pages and ends are among them.
``--drafts`` verifies so many of each request in a step, which a drafter that costs nothing has left; all are accepted.
With ``--chains`` they are chain steps that follow each other: without sampling, of graphs that cost nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from ...common.api.drafts import Drafts
from ...common.api.messages import FromEngine, Generate
from ...common.api.sampling import SamplingParams
from ...common.config.server import ScheduleArgs
from ...common.distributed.tp import TPGroup
from ...common.engine.unified_scheduler import UnifiedScheduler
from ...common.execution.draft_pass import DraftPass
from ...common.execution.executor import Executor
from ...common.forward.chain_rows import ChainLevels, ChainRows
from ...common.forward.forward_batch import ForwardBatch, ModelInput
from ...common.garbage_collector import freeze_collector
from ...common.kvcache.layout import KVLayout
from ...common.kvcache.manager import KVCacheManager
from ...common.runner.cuda_graphs.chain_graphs import Verified
from ...common.runner.cuda_graphs.chain_inputs import ChainInputs
from ...common.runner.cuda_graphs.decode_inputs import DecodeInputs
from ...common.runner.model_runner import StepLogits
from ...common.sampling.sampler import Sampler
from ...common.scheduler.batcher import Batcher
from ...common.scheduler.chain_planner import ChainPlanner
from ...common.scheduler.drafting import Drafting
from ...common.scheduler.request_tracker import RequestTracker
from ...common.speculative.base import Features
from ...kernels.arguments import CHAIN_TOKENS, ChainState

VOCAB = 32
PAGE = 16


class FreeModel:
    """What an Executor asks of a ModelRunner; all logits are equal but for one token's."""

    model = None  # of which weights nobody asks
    expert_gauges: dict[str, float] = {}
    chosen_experts = None
    before_step = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.layout = KVLayout(groups=(1,), num_kv_heads=1, head_dim=1, page_size=PAGE, dtype="float32")
        self._logits = torch.zeros(4096, VOCAB)
        self._logits[:, 7] = 1.0
        self._likeliest = self._logits.argmax(-1)
        self._inputs = DecodeInputs(512, 1 << 20, 0, self.device)
        self._chain_inputs: ChainInputs | None = None
        self.chain_levels: ChainLevels | None = None

    def capture_chains(self, size: int, num_drafts: int) -> None:
        """Prepares chain steps of ``size`` requests."""
        self.chain_levels = ChainLevels((num_drafts,), (size,), 0)
        width = num_drafts + 1
        self._chain_inputs = ChainInputs(size, size * width, 1 << 20, 0, 1, self.device)
        self._result = ChainState.empty(size, num_drafts, self.device)
        self._result.packed[:, CHAIN_TOKENS:] = 7
        self._result.counts.fill_(width)
        self._verified: dict[int, Verified] = {}

    def verify_chains(self, chains: ChainRows) -> Verified:
        assert self._chain_inputs is not None
        count, width = chains.num_reqs, chains.width
        self._chain_inputs.fill(chains, count)
        found = self._verified.get(count)
        if found is None:
            rows = count * width
            result = self._result.packed[:count].view(-1)
            found = self._verified[count] = Verified(
                count, width, SimpleNamespace(sample_positions=torch.zeros(rows)),  # type: ignore[arg-type]
                self._logits[:rows], self._likeliest[:rows].clone(), result)
        return found

    def draft_chains(self, verified: Verified, reqs: Any, *, greedy: bool) -> None:
        """They are there."""

    def run_idle_batch(self) -> None:
        """Nobody else."""

    def step(self, step: ModelInput, after_group: Any = None) -> StepLogits:
        count = step.num_logits
        if step.drafts:
            batch = ForwardBatch.from_columns(step.columns, step.token_ids, self.device, step.logits_rows)
            return StepLogits(self._logits[:count], self._likeliest[:count], batch=batch)
        if not step.is_plain_decode:
            return StepLogits(self._logits[:count])
        self._inputs.fill(step.columns, count)
        return StepLogits(self._logits[:count], self._likeliest[:count])


class FreeDrafter:
    """Drafts what the model writes."""

    def __init__(self) -> None:
        self._drafts: dict[int, Drafts | None] = {}

    def run(self, step: Any) -> list[Drafts | None]:
        return [self._drafts.setdefault(limit, Drafts((7,) * limit) if limit else None) for limit in step.limits]


class Bench:
    def __init__(self, batch: int, context: int, steps: int, sampled: bool, changing: bool = False,
                 logprobs: int = 0, drafts: int = 0, chains: bool = False):
        """``logprobs``: so many requests report log-probabilities; ``chains``: drafts are chain steps'. ``changing``:
        about one request ends in every decode step, and a new one comes. Else they want 40 tokens more than ``steps``.
        """
        pages = batch * (-(-(context + steps + 40) // PAGE) + 1)
        self.sent: FromEngine | None = None
        self.tracker = RequestTracker(self._take, eos_ids=frozenset({1}), vocab_size=1 << 31,
                                      max_request_tokens=1 << 20, max_requests=4096, timeout=1e9)
        cache = KVCacheManager(pages, PAGE)
        model, drafting, planner = FreeModel(), None, None
        if drafts:
            drafting = Drafting(None, cache, drafts, 1 << 20)
        if drafting is not None and chains:
            model.capture_chains(batch, drafts)
            assert model.chain_levels is not None
            planner = ChainPlanner(model.chain_levels, cache, drafting)
        batcher = Batcher(cache, ScheduleArgs(chunked_prefill_size=1 << 20, max_running_requests=batch,
                                              schedule_conservativeness=0.0), drafting=drafting, chains=planner)
        draft_pass = DraftPass(FreeDrafter(), Features(), TPGroup()) if drafts else None
        executor = Executor(model, Sampler(VOCAB, "cpu", 0), None, draft_pass)  # type: ignore[arg-type]
        self.scheduler = UnifiedScheduler(batcher, executor, self.tracker, overlap=True)
        self._batch, self._context, self._sampled, self._changing = batch, context, sampled, changing
        self._random, self._count, self._logprobs = np.random.default_rng(0), 0, logprobs
        for i in range(batch):
            self._add(8 + i if changing else steps + 40)
        while len(batcher.running) < batch:
            self.scheduler.step(0.0)
        for _ in range(5):
            self.step()
        freeze_collector()

    def _take(self, message: FromEngine) -> None:
        self.sent = message

    def _add(self, output_len: int) -> None:
        self._count += 1
        params = SamplingParams(temperature=1.0 if self._sampled else 0.0, top_p=0.9 if self._sampled else 1.0,
                                max_new_tokens=output_len, ignore_eos=True)
        prompt = self._random.integers(2, VOCAB, self._context).tolist()
        req = self.tracker.accept(Generate(str(self._count - 1), prompt, params,
                                           return_logprob=self._count <= self._logprobs), 0.0)
        assert req is not None
        self.scheduler.add(req)

    def step(self) -> None:
        self.scheduler.step(0.0)
        self.tracker.flush()

    def life(self) -> list[float]:
        """Milliseconds of each step until no request is left."""
        times = []
        while not self.scheduler.idle:
            begin = time.thread_time()
            self.step()
            times.append(1e3 * (time.thread_time() - begin))
        return times

    def refill(self) -> None:
        while self._changing and len(self.tracker.live) < self._batch:
            self._add(self._batch)


def median_ms(work: Callable[[], object], steps: int, before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(steps):
        before()
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return 1e3 * float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--changing", action="store_true", help="a request ends and another comes in every other step")
    parser.add_argument("--logprobs", type=int, default=0, help="so many requests report log-probabilities")
    parser.add_argument("--drafts", type=int, default=0, help="so many of each request in a step")
    parser.add_argument("--chains", action="store_true", help="with --drafts: as chain steps")
    parser.add_argument("--life", type=int, help="so many tokens of each request")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, for the largest batch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| batch | step ms | us a request | encode ms |\n|---|---|---|---|")
    for batch in map(int, args.batches.split(",")):
        if args.life:
            bench = Bench(batch, args.context, args.life - 40, args.sampled, drafts=args.drafts, chains=args.chains)
            step = float(np.mean(bench.life()))
            rows.append({"batch": batch, "life": args.life, "step_ms": step})
            print(f"| {batch} | {step:.3f} | {1e3 * step / batch:.2f} | - |", flush=True)
            continue
        bench = Bench(batch, args.context, 2 * args.steps * (1 + args.drafts), args.sampled, args.changing,
                      args.logprobs, args.drafts, args.chains)
        step = median_ms(bench.step, args.steps, bench.refill)
        message = bench.sent
        encode = median_ms(lambda message=message: msgspec.msgpack.encode(message), 50)
        rows.append({"batch": batch, "step_ms": step, "encode_ms": encode})
        print(f"| {batch} | {step:.3f} | {1e3 * step / batch:.2f} | {encode:.3f} |", flush=True)
    if args.profile and not args.life:
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                bench.refill()
                bench.step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if args.out:
        args.out.write_text(json.dumps({"context": args.context, "sampled": args.sampled, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
