"""Ends a command that cannot do its work with one sentence, and a status other than 0."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from ..api.errors import ConfigError
from .packages import ENGINE, needs_engine

P = ParamSpec("P")

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


def command(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Makes a function a command: an exception ends the process with a sentence."""

    def decorate(main: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with exit_with_sentence(name):
                main(*args, **kwargs)

        return run

    return decorate


@contextmanager
def exit_with_sentence(name: str) -> Iterator[None]:
    """Ends the process when the block raises, without a traceback on the terminal."""
    try:
        yield
    except ConfigError as error:
        status, sentence = 2, str(error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # ... --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        status, sentence = 1, describe_error(error)
    else:
        return
    print(f"{name}: error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(status)


def describe_error(error: Exception) -> str:
    """Describes an unexpected error. Its traceback goes to a file, which the sentence names."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if isinstance(error, ModuleNotFoundError) and missing in ENGINE:
        return needs_engine(missing)
    text = f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__
    return f"{text.rstrip('.')}.{_save_traceback(error)}"


def _first_line(error: Exception) -> str:
    """Cuts a library's error text, which may continue with C++ frames."""
    return str(error).strip().splitlines()[0][:300]


def _save_traceback(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="baton-traceback-", suffix=".txt", delete=False,
                                         encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return ""
    return f" The traceback is in {file.name}."


