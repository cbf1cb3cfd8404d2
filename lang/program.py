"""Programs: functions of a state, run once or for a batch of arguments."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from .backends.base import Backend
from .backends.default import chosen_backend
from .errors import ProgramError
from .interpreter import Interpreter, Run
from .sampling import NAMES, SamplingParams
from .state import ProgramState

_DEFAULTS = SamplingParams(max_new_tokens=128)


class Program:
    """A function whose first parameter is the state, as ``@function`` makes it.

    Keyword arguments of ``run`` that the function does not have are sampling parameters: defaults of every ``gen``.
    Raises ProgramError for a function without a parameter.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None):
        names = [name for name, each in inspect.signature(func).parameters.items()
                 if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if not names:
            raise ProgramError(f"{func.__name__} needs the state as its first parameter: def {func.__name__}(s, ...).")
        self.func = func
        self.arg_names = names[1:]
        self._bound = dict(bound or {})

    def bind(self, **arguments: Any) -> Program:
        """The program with some arguments given; raises ProgramError for one that it does not have."""
        if unknown := set(arguments) - set(self.arg_names):
            raise ProgramError(f"{self.func.__name__} has no parameter {', '.join(sorted(unknown))}.")
        return Program(self.func, {**self._bound, **arguments})

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        return self.run(*args, **kwargs)

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Calls the function and returns its state, which may still be growing.

        With ``stream`` the function runs in a thread too, and ``text_iter`` reads what comes. Raises what the function
        raises, ProgramError where no backend is set.
        """
        arguments, params = self._split(kwargs)
        interpreter = Interpreter(Run(chosen_backend(backend), params, stream))
        state = ProgramState(interpreter)
        if not stream:
            self._call(state, interpreter, args, arguments)
            return state
        interpreter.program = threading.Thread(target=self._call_quietly, args=(state, interpreter, args, arguments),
                                               name="baton-program", daemon=True)
        interpreter.program.start()
        return state

    def run_batch(self, batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]], *, backend: Any = None,
                  num_threads: int | Literal["auto"] = "auto", progress_bar: bool = False,
                  generator_style: bool = False, **params: Any) -> Any:
        """The states of a batch in its order, finished; ``generator_style`` yields each as soon as those before it are.

        An item is a dict of arguments or a list of them. Up to ``num_threads`` programs run at a time (by default 16
        times the cores, at least 96). A program that fails leaves its error in its state.
        """
        items = [self._named(item) for item in batch_kwargs]
        if unknown := set(params) - set(NAMES):
            raise ProgramError(f"run_batch has no parameter {', '.join(sorted(unknown))}.")
        chosen = chosen_backend(backend)
        limit = max(96, 16 * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
        states = self._batch(items, chosen, SamplingParams(**params).over(_DEFAULTS), limit, progress_bar)
        return states if generator_style else list(states)

    def _batch(self, items: list[dict[str, Any]], backend: Backend, params: SamplingParams, limit: int,
               progress_bar: bool) -> Iterator[ProgramState]:
        if not items:
            return
        progress = _Progress(len(items)) if progress_bar else None
        with ThreadPoolExecutor(min(limit, len(items))) as pool:
            futures = [pool.submit(self._whole, item, backend, params) for item in items]
            for future in futures if progress else ():
                future.add_done_callback(progress.step)  # type: ignore[union-attr]
            for future in futures:
                yield future.result()

    def _whole(self, arguments: dict[str, Any], backend: Backend, params: SamplingParams) -> ProgramState:
        interpreter = Interpreter(Run(backend, params))
        state = ProgramState(interpreter)
        self._call_quietly(state, interpreter, (), arguments)
        interpreter.error()  # waits
        return state

    def _call(self, state: ProgramState, interpreter: Interpreter, args: Sequence[Any],
              arguments: Mapping[str, Any]) -> None:
        try:
            state.ret_value = self.func(state, *args, **{**arguments, **self._bound})
        except Exception as error:
            interpreter.end(error)
            raise
        interpreter.end()

    def _call_quietly(self, state: ProgramState, interpreter: Interpreter, args: Sequence[Any],
                      arguments: Mapping[str, Any]) -> None:
        try:
            self._call(state, interpreter, args, arguments)
        except Exception:  # the state has it: its readers raise it
            return

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
        params = {name: value for name, value in kwargs.items() if name in NAMES and name not in self.arg_names}
        arguments = {name: value for name, value in kwargs.items() if name not in params}
        return arguments, SamplingParams(**params).over(_DEFAULTS)

    def _named(self, item: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, str) or len(item) > len(self.arg_names):
            raise ProgramError(f"run_batch takes dicts or lists of {', '.join(self.arg_names)}, got {item!r}.")
        return dict(zip(self.arg_names, item))


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Makes a program of a function of a state; raises ProgramError for ``num_api_spec_tokens``, which is not here."""
    if num_api_spec_tokens is not None:
        raise ProgramError("num_api_spec_tokens is not supported: leave it out, and let gen be all of assistant(...).")
    return Program if func is None else Program(func)


class _Progress:
    """A line on stderr that counts finished programs."""

    def __init__(self, total: int):
        self._total, self._done = total, 0
        self._lock = threading.Lock()

    def step(self, _: Future[ProgramState]) -> None:
        with self._lock:
            self._done += 1
            end = "\n" if self._done == self._total else ""
            print(f"\r{self._done}/{self._total} programs", end=end, file=sys.stderr, flush=True)
