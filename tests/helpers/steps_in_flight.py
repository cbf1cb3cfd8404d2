"""Steps that are planned before others have run, and run in turns, a layer each."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.common.attention.workspace import AttentionWorkspace
from baton.common.forward.forward_batch import ForwardBatch, build_forward_batch
from baton.common.forward.step_context import StepContext
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.small_models import load_runner, row_of, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

MODELS = {"Llama": save_model, "Qwen3Moe": save_moe, "windows": lambda folder, family: save_gpt_oss(folder),
          "DeepSeek": lambda folder, family: save_deepseek(folder, 3)}
VOCABULARY = 90


def runners_of(folder: Path, names: Sequence[str], backend: str) -> list[ModelRunner]:
    """A runner of each of MODELS."""
    for name in names:
        (folder / name).mkdir()
        MODELS[name](folder / name, name)
    return [load_runner(server_config(folder / name, page_size=8, backend=backend)) for name in names]


def batches_of(runner: ModelRunner, seed: int, count: int) -> list[ForwardBatch]:
    """A chunk of three prompts, one that ends two of them, and a decode step."""
    lengths = np.random.default_rng(seed).integers(4, 4 + count, 3)
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (3, 2 * count + 8))
    pages = scattered_pages(runner, 6, 64).reshape(2, 3, -1)[seed % 2]
    half = lengths // 2
    parts = [[(b, 0, half[b]) for b in range(3)], [(b, half[b], lengths[b]) for b in range(2)],
             [(b, lengths[b], lengths[b] + 1) for b in range(2)]]
    return [build_forward_batch([row_of(runner, tokens[b, start:stop], start, pages[b]) for b, start, stop in rows],
                                runner.layout.page_size, runner.device) for rows in parts]


def alone(runner: ModelRunner, seed: int, count: int) -> list[torch.Tensor]:
    """Logits of the steps, one after the other."""
    for group in runner.pool.groups:
        group.zero_()
    found = [runner.forward(batch).clone() for batch in batches_of(runner, seed, count)]
    return [*found, *(group[:-1].clone() for group in runner.pool.groups)]


def in_turns(runners: Sequence[ModelRunner], steps: Sequence[StepContext]) -> list[torch.Tensor]:
    """Runs the steps in a thread each, of which one computes a layer at a time, in turn."""
    turns = [threading.Semaphore(0) for _ in steps]
    found: list[Any] = [None] * len(steps)
    ended = [False] * len(steps)

    def pass_on(index: int) -> None:
        others = [(index + offset) % len(steps) for offset in range(1, len(steps) + 1)]
        turns[next((other for other in others if not ended[other]), index)].release()

    def after_layer(index: int) -> Any:
        def pass_and_wait(layer: int) -> None:
            pass_on(index)
            turns[index].acquire()

        return pass_and_wait

    def compute(index: int) -> None:
        turns[index].acquire()
        try:
            found[index] = runners[index].run(dataclasses.replace(steps[index], after_layer=after_layer(index)))
        finally:
            ended[index] = True
            pass_on(index)

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(len(steps))]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    return found


def check_two_models(folder: Path, names: Sequence[str], backend: str, counts: tuple[int, int] = (9, 21)) -> None:
    """Two models' steps, each planned before the other's has run, compute what they compute alone."""
    runners = runners_of(folder, names, backend)
    want = [alone(runner, seed, count) for seed, (runner, count) in enumerate(zip(runners, counts))]
    for runner in runners:
        for group in runner.pool.groups:
            group.zero_()
    batches = [batches_of(runner, seed, count) for seed, (runner, count) in enumerate(zip(runners, counts))]
    found: list[list[torch.Tensor]] = [[], []]
    for pair in zip(*batches):
        steps = [runner.plan(batch) for runner, batch in zip(runners, pair)]
        for kept, logits in zip(found, in_turns(runners, steps)):
            kept.append(logits)
    for runner, kept, wanted in zip(runners, found, want):
        kept.extend(group[:-1] for group in runner.pool.groups)
        assert len(kept) == len(wanted) and all(map(torch.equal, kept, wanted))


def check_two_workspaces(runner: ModelRunner, counts: tuple[int, int] = (9, 21)) -> None:
    """Two steps of one model, a workspace each."""
    want = [alone(runner, seed, count) for seed, count in enumerate(counts)]
    pages = [sum(pair) for pair in zip(*(wanted[3:] for wanted in want))]
    for group in runner.pool.groups:
        group.zero_()
    second = AttentionWorkspace(runner.device)
    for index, pair in enumerate(zip(*(batches_of(runner, seed, count) for seed, count in enumerate(counts)))):
        steps = [runner.plan(pair[0]), runner.plan(pair[1], workspace=second)]
        found = in_turns([runner] * 2, steps)
        assert all(torch.equal(logits, wanted[index]) for logits, wanted in zip(found, want))
    assert all(torch.equal(group[:-1], wanted) for group, wanted in zip(runner.pool.groups, pages))


def shared_objects(runner: ModelRunner) -> Iterator[Any]:
    """What steps share and may not change: groups, exchanges, backends, the model's modules and the runner."""
    parallel = runner._parallel
    yield from (runner, parallel, parallel.tp, parallel.attn_tp, parallel.dp, parallel.experts, parallel.pp)
    for exchange in (parallel.token_exchange, parallel.logits_exchange):
        yield from (part for part in (exchange, exchange.low_latency, exchange.all_to_all) if part is not None)
    yield runner.dp_sync._parallel
    yield from _backends(runner._attention)
    model = runner._model
    yield from (model, *model.layers)
    for layer in model.layers:
        yield from (layer.attention, layer.mlp, layer.input_norm, layer.mlp_norm)
    if runner._two_batch_overlap is not None:
        yield runner._two_batch_overlap


def _backends(backend: Any) -> Iterator[Any]:
    yield backend
    for value in vars(backend).values():
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "plan"):
                yield from _backends(part)


def snapshot(runner: ModelRunner) -> dict[tuple[int, str], int]:
    """The identity of every attribute of ``shared_objects``, and the contents of those that are lists and dicts."""
    found = {}
    for one in shared_objects(runner):
        for name, value in vars(one).items():
            found[id(one), f"{type(one).__name__}.{name}"] = id(value)
            if isinstance(value, (list, dict)):
                found[id(one), f"{type(one).__name__}.{name} holds"] = hash(tuple(map(id, value)))
    return found
