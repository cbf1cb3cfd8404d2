"""The parser of one request's answers: reasoning first, then tool calls; the rest is content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .cursor import PlainParser, ScriptParser
from .harmony import MARKERS, Harmony
from .output_parser import OutputParser, ReasoningDelta
from .reasoning import ReasoningFormat, ReasoningParser
from .tools import CallEmitter, Schemas, ToolFormat


@dataclass(frozen=True)
class OutputFormat:
    """The formats to parse in one answer. ``schemas`` is empty where the request offers no tool.

    ``inside``: the prompt has opened the reasoning. ``max_calls``: further calls are dropped.
    """

    tools: ToolFormat | None = None
    schemas: Schemas | None = None
    max_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    separate: bool = True
    stream: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that must be in the text, even where they are special tokens."""
        markers = self.tools.markers if self._parses_calls and self.tools else ()
        if self.reasoning is None:
            return markers
        if self.reasoning.harmony:
            return *markers, *MARKERS
        return *markers, self.reasoning.opener, self.reasoning.closer

    @property
    def _parses_calls(self) -> bool:
        return self.tools is not None and bool(self.schemas)

    def new_parser(self) -> OutputParser:
        """A new parser for one choice."""
        if self.reasoning is not None and self.reasoning.harmony:
            return _HarmonyParser(self)
        rest = self._call_parser()
        if self.reasoning is None:
            return rest
        return ReasoningParser(self.reasoning, rest, inside=self.inside, separate=self.separate, stream=self.stream)

    def _call_parser(self) -> OutputParser:
        if self.tools is None or not self.schemas:
            return PlainParser()
        script, schemas = self.tools.script, self.schemas
        return ScriptParser(lambda cursor: script(cursor, CallEmitter(cursor, schemas, self.max_calls)))


class _HarmonyParser(ScriptParser):
    """The parser of harmony, which holds both reasoning and calls."""

    def __init__(self, output_format: OutputFormat):
        as_part = ReasoningDelta if output_format.separate else str
        self._harmony = Harmony(with_calls=output_format._parses_calls, as_part=as_part,
                                stream=output_format.stream)
        schemas, limit = output_format.schemas or {}, output_format.max_calls
        super().__init__(lambda cursor: self._harmony.read(cursor, CallEmitter(cursor, schemas, limit)))

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        return self._harmony.reasoning_spans


def count_reasoning_tokens(spans: list[tuple[int, int]], text: str, tokens: Iterable[bytes]) -> int:
    """The number of an answer's ``tokens``, given as bytes, that begin within ``spans`` of its ``text``."""
    edges = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
    at = count = 0
    for token in tokens:
        count += any(start <= at < end for start, end in edges)
        at += len(token)
    return count
