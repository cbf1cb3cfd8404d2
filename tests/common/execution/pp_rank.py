"""One rank of test_pp.py: ``pp_rank.py RANK SIZE INIT_METHOD OUT PP_SIZE DEVICE CASE...``, each case a JSON object.

A case has a checkpoint, prompts, and options of the engine. Rank 0 plays the front: requests come turn by turn, and an
abort where the case names one. OUT gets what rank 0 answered, and when each step was computed on this stage.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch

from baton.common.api.messages import Abort, Failed, Generate, Shutdown
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ParallelArgs
from baton.common.distributed.parallel import Parallel, init_parallel
from baton.common.engine.control import Control
from baton.common.engine.loop import EngineLoop
from baton.common.engine.rank_channel import PPTicker
from baton.common.execution.pp_channel import PPChannel
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.outputs import outputs_of
from baton.tests.helpers.rank_processes import SECONDS, end_rank, place_of
from baton.tests.helpers.small_models import forward, load_runner, scattered_pages, server_config


def main(rank: int, size: int, init_method: str, out: str, pp_size: int, device: str, cases: list[dict]) -> None:
    torch.set_num_threads(1)
    place, backend = place_of(rank, device)
    parallel = init_parallel(rank, size, 1, init_method, place, timeout=SECONDS / 2, pp_size=pp_size, backend=backend)
    seen = {"stage": parallel.pp.rank, "cases": [run(dict(case), parallel) for case in cases]}
    if device == "cpu":
        seen["logits"] = logits_of(cases[0]["checkpoint"], parallel)
    torch.save(seen, out)
    end_rank(parallel.world)


def logits_of(checkpoint: str, parallel: Parallel) -> torch.Tensor:
    """Of 30 tokens, in two steps; the last stage has them."""
    runner = load_runner(server_config(checkpoint), parallel)
    tokens = np.random.default_rng(2).integers(0, 97, 30)
    pages = scattered_pages(runner, 1, 30)[0]
    first = forward(runner, [(tokens[:29], 0, pages)])
    return torch.cat((first, forward(runner, [(tokens[29:], 29, pages)])))


class Front:
    """In place of a channel: what arrives in each turn, and the end when all is answered."""

    def __init__(self, turns: list[list], engine: Engine):
        self.turns = turns
        self.engine = engine
        self._ready, filled = os.pipe()
        os.write(filled, b"!")

    @property
    def inbox(self) -> int | None:
        """What a turn waits for beside results."""
        return self._ready if self.turns or not self.engine.tracker.live else None

    def receive(self, wait_ms: int) -> list:
        if self.turns:
            return self.turns.pop(0)
        return [] if self.engine.tracker.live else [Shutdown()]


class Watched:
    """An executor whose steps are written down: when each began and ended on this stage."""

    def __init__(self, engine: Engine):
        self.steps: list[tuple[float, float]] = []
        self._launch = engine.executor.launch
        engine.executor.launch = self.launch

    def launch(self, batch, after_group=None):
        began = time.monotonic()
        step = self._launch(batch, after_group)
        self.steps.append((began, time.monotonic()))
        return step


def slowed(forward, seconds: float, *, before: bool):
    """A forward pass of this stage takes ``seconds`` more: before it sends, or after it has received."""
    def slowly(*args):
        time.sleep(seconds * before)
        found = forward(*args)
        time.sleep(seconds * (not before))
        return found

    return slowly


def run(case: dict, parallel: Parallel) -> dict:
    line = PPChannel(parallel)
    prompts, abort, delay = case.pop("prompts"), case.pop("abort", None), case.pop("delay", 0.0)
    fields, parts = case.pop("fields", {}), case.pop("parallel", {})
    engine = Engine(case.pop("checkpoint"), parallel=parallel, device=parallel.device, line=line,
                    parts=ParallelArgs(pp_size=parallel.pp.size, **parts), **case)
    watched = Watched(engine)
    engine.runner.step = slowed(engine.runner.step, delay, before=parallel.pp.is_first)
    control = Control(engine.config, parallel.world, engine.runner, engine.scheduler.batcher)
    turns = [[Generate(str(i), prompt, SamplingParams(temperature=0.0, max_new_tokens=8 + 5 * i % 11), **fields)]
             for i, prompt in enumerate(prompts)]
    if abort is not None:
        turns.append([Abort(str(abort))])
    EngineLoop(PPTicker(Front(turns, engine), line), engine.tracker, engine.scheduler, engine.cache, control,
               engine.sent.append).run()
    assert not engine.tracker.live and engine.cache.num_allocated == 0
    engine.cache.check_integrity()
    line.close()
    outputs = outputs_of(engine.sent)
    return {"tokens": {rid: [token for item in outputs if item.rid == rid for token in item.token_ids]
                       for rid in map(str, range(len(prompts)))},
            "prompt_logprobs": {item.rid: item.prompt_logprobs.values for item in outputs if item.prompt_logprobs},
            "logprobs": {rid: [value for item in outputs if item.rid == rid and item.logprobs
                               for value in item.logprobs.values] for rid in map(str, range(len(prompts)))},
            "failed": [message.rid for message in engine.sent if isinstance(message, Failed)],
            "aborted": [item.rid for item in outputs if item.finish is not None and item.finish.reason == "abort"],
            "steps": watched.steps, "layers": engine.runner.layout.num_layers,
            "cached": sum(item.num_cached_tokens for item in outputs if item.finish is not None),
            "loaded": 0 if engine.scheduler.batcher.loads is None else engine.scheduler.batcher.loads.num_loaded,
            "retracted": engine.scheduler.batcher.retraction.num_retracted}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]), sys.argv[6],
         [json.loads(case) for case in sys.argv[7:]])
