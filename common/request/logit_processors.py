"""Custom logit processors: imported on the server by the name in a request, or unpickled from it, and run on the rows
of such requests.

A processor is a callable ``(logits, params) -> logits``, or a class that builds one without arguments. ``logits``
[n, vocab] float32 are the rows of all requests of a step that name it, and may be changed in place; ``params`` are
their dicts of ``custom_params``, one a row, each of which lives as long as its request: a processor may store state
there (on a pair's decode server, it starts with the request's values). ``"__req__"`` in it is the request's
``RequestTokens``, as in SGLang. Where a call raises, each of its rows is tried alone, so that only the failing ones
fail.

With speculative decoding a row may follow drafts, which ``output_ids`` then end with. Its ``params`` are a copy of
those of the row before, made after the processor has run there, and become the request's if its drafts are accepted.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..api.errors import InvalidRequest
from .serialized_processors import is_serialized, serialized_name, unpickle

if TYPE_CHECKING:
    from .token_buffer import TokenBuffer

PARAM = "custom_logit_processor"
Processor = Callable[[torch.Tensor, list[dict[str, Any]]], torch.Tensor]


class RequestTokens:
    """Tokens of a row's request, under SGLang's attribute names."""

    def __init__(self, tokens: TokenBuffer, first: int, num_prompt_tokens: int):
        """The prompt is ``tokens[first:num_prompt_tokens]``: before ``first`` there are embeddings."""
        self._tokens = tokens
        self._first = first
        self._num_prompt_tokens = num_prompt_tokens
        self.pending: torch.Tensor | None = None  # the newest token, where only the device knows it
        self.path: tuple[int, ...] = ()  # drafts after the known tokens

    def after(self, path: tuple[int, ...]) -> RequestTokens:
        """Returns these tokens with the drafts ``path`` after them."""
        found = RequestTokens(self._tokens, self._first, self._num_prompt_tokens)
        found.path = path
        return found

    @property
    def count(self) -> int:
        """The number of known tokens."""
        return self._tokens.count

    def known_since(self, count: int) -> list[int]:
        """The known tokens after the first ``count``."""
        ids: list[int] = self._tokens.view(count).tolist()
        return ids

    @property
    def origin_input_ids(self) -> list[int]:
        ids: list[int] = self._tokens.view(self._first, self._num_prompt_tokens).tolist()
        return ids

    @property
    def output_ids(self) -> list[int]:
        """With overlapped scheduling on a GPU, reading this waits for the device."""
        known: list[int] = self._tokens.view(self._num_prompt_tokens).tolist()
        return [*known, *self.path] if self.pending is None else [*known, int(self.pending)]


class RowProcessor:
    """The processor of one request with its parameters, ``params`` for rows that follow its known tokens. ``path``: its
    import path, or a name that only requests with the same processor have."""

    def __init__(self, path: str, processor: Processor, params: dict[str, Any], tokens: RequestTokens):
        self.path = path
        self.processor = processor
        self.params = params
        self.tokens = tokens
        self._branches: dict[tuple[int, ...], dict[str, Any]] = {}  # parameters after drafts, by these
        self._branched_at = 0  # known tokens then

    @classmethod
    def of(cls, path: str, params: dict[str, Any], tokens: RequestTokens) -> RowProcessor:
        """Imports the processor, or unpickles it; raises InvalidRequest like ``load``."""
        name = serialized_name(path) if is_serialized(path) else path
        return cls(name, load(path), {**params, "__req__": tokens}, tokens)

    def settle(self) -> None:
        """Takes over the parameters after those drafts that have become tokens. Call it before a row without drafts."""
        if self._branches:
            *accepted, _ = self.tokens.known_since(self._branched_at) or [0]
            self.params = self._branches.get(tuple(accepted), self.params)
            self.params["__req__"] = self.tokens
            self._branches = {}

    def branch(self, path: tuple[int, ...]) -> dict[str, Any]:
        """Returns parameters for the row after the drafts ``path``: a copy of those of the row before, which have
        seen it. Raises what copying them raises."""
        self._branched_at = self.tokens.count
        before = {name: value for name, value in self._branches.get(path[:-1], self.params).items()
                  if name != "__req__"}
        params = {**copy.deepcopy(before), "__req__": self.tokens.after(path)}
        self._branches[path] = params
        return params


_RENAMED_MODULES = {"baton.common.engine.logit_processors": "baton.common.sampling.builtin_processors"}
"""Import paths that clients may still send, by the module that has the processors now."""


def load(path: str) -> Processor:
    """The processor at ``package.module:Name``, or the serialized one, loaded once; raises InvalidRequest where there
    is none."""
    return _unpickled(path) if is_serialized(path) else _imported(path)


@lru_cache(maxsize=1024)
def _imported(path: str) -> Processor:
    module, _, name = path.partition(":")
    module = _RENAMED_MODULES.get(module, module)

    def find() -> Any:
        named: Any = importlib.import_module(module)
        for part in name.split("."):
            named = getattr(named, part)
        return named

    return _instance(find, path, "imported")


@lru_cache(maxsize=128)  # of up to MAX_SERIALIZED_PROCESSOR characters each
def _unpickled(serialized: str) -> Processor:
    return _instance(lambda: unpickle(serialized), serialized_name(serialized), "unpickled")


def _instance(find: Callable[[], Any], name: str, how: str) -> Processor:
    """The callable that ``find`` returns, or an instance of the class."""
    try:
        named = find()
        instance: Any = named() if inspect.isclass(named) else named
    except (Exception, SystemExit) as error:  # a module, or a pickle, may do anything
        raise InvalidRequest(f"{PARAM} {name!r} cannot be {how} here: {summarize(error)}.", param=PARAM) from None
    if not callable(instance):
        raise InvalidRequest(f"{PARAM} {name!r} is no callable.", param=PARAM)
    processor: Processor = instance
    return processor


def summarize(error: BaseException) -> str:
    """Type and message of an error, at most 300 characters."""
    text = f"{type(error).__name__}: {error}".rstrip(".")
    return text if len(text) <= 300 else f"{text[:300]}..."
