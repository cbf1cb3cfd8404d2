"""How a command of ours ends that cannot do its work: with one sentence, and a status other than 0."""

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
"""A shell's exit code of a command that Ctrl-C ended."""


def command(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Makes a function a command: what it raises ends the process with a sentence."""

    def decorate(main: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with one_sentence(name):
                main(*args, **kwargs)

        return run

    return decorate


@contextmanager
def one_sentence(name: str) -> Iterator[None]:
    """Ends the process where the block raises: no traceback on the terminal, whatever it was."""
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
        status, sentence = 1, sentence_of(error)
    else:
        return
    print(f"{name}: error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(status)


def sentence_of(error: Exception) -> str:
    """What to tell of an error that nobody foresaw. Its traceback goes to a file, which the sentence names."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if isinstance(error, ModuleNotFoundError) and missing in ENGINE:
        return needs_engine(missing)
    told = f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__
    return f"{told.rstrip('.')}.{_kept(error)}"


def _first_line(error: Exception) -> str:
    """Of a library's error text, which may go on with C++ frames."""
    return str(error).strip().splitlines()[0][:300]


def _kept(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="baton-traceback-", suffix=".txt", delete=False,
                                         encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return ""
    return f" The traceback is in {file.name}."


