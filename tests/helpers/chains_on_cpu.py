"""Chain steps of whole engines on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

from baton.common.execution.executor import Executor
from baton.common.request.step_input import StepInput
from baton.common.runner.cuda_graphs.chain_sizes import chain_sizes
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.chain_steps import Again

SIZES = (1, 2, 5, 16, 40)
ACTIVE: ContextVar[bool] = ContextVar("chains_on_cpu", default=False)
"""True within ``chains_on_cpu``, for those who start other processes."""


@contextmanager
def chains_on_cpu(sizes: Sequence[int] = SIZES) -> Iterator[list[StepInput]]:
    """Engines that are built and run within it take chain steps as on a GPU, recorded by a recorder that runs the work
    again, and launch each step before they process the results of the one before. Yields the chain steps that were
    launched so far."""
    launched: list[StepInput] = []
    load, launch = ModelRunner.load.__func__, Executor.launch  # type: ignore[attr-defined]

    def loaded(cls: type[ModelRunner], config: Any, *args: Any, **options: Any) -> ModelRunner:
        runner: ModelRunner = load(cls, config, *args, **options)
        record_chains(runner, config, sizes)
        return runner

    def launched_now(self: Executor, step: StepInput, *args: Any, **options: Any) -> Any:
        found = launch(self, step, *args, **options)
        if step.chains is not None:
            launched.append(step)
            found.result.token_ids()  # the next step overwrites what a GPU would have copied by then
        return found

    with ExitStack() as stack:
        for owner, name, new in ((ModelRunner, "load", classmethod(loaded)), (Executor, "launch", launched_now),
                                 (Executor, "asynchronous", property(lambda self: True)),
                                 (Executor, "event", lambda self: None)):
            stack.enter_context(patch.object(owner, name, new))
        stack.callback(ACTIVE.reset, ACTIVE.set(True))
        yield launched


def record_chains(runner: ModelRunner, config: Any, sizes: Sequence[int] = SIZES) -> None:
    """Records the chain steps that a GPU would capture, of ``sizes`` requests."""
    if runner.chain_steps is not None and (levels := chain_sizes(config)):
        runner.chain_steps.record(
            {count: sorted({min(size, most[-1]) for size in sizes}) for count, most in levels.items()}, Again(),
            lambda stage, share: None)


def num_following(steps: Sequence[StepInput]) -> int:
    """Chain steps some of whose tokens the host did not know."""
    return sum(bool((step.chains.sources >= 0).any()) for step in steps if step.chains is not None)
