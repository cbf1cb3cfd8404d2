"""Parameters of a generation: those of a run, and those of one ``gen`` over them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ProgramError

TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (r"[-+]?[0-9]+[ \n]*", (" ", "\n")),
    "float": (r"[-+]?[0-9]*\.?[0-9]+[ \n]*", (" ", "\n")),
    "bool": (r"(True|False)", ()),
    "str": (r'"[\w\d\s]*"', ()),
}
"""By ``dtype``: the regular expression of its values, and the stop strings that end one."""


@dataclass(frozen=True)
class SamplingParams:
    """None leaves a parameter to the run, and of a run to the backend."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: type | str | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, and where they are None those of ``defaults``."""
        return replace(defaults, **self.given())

    def given(self) -> dict[str, Any]:
        """The parameters that are not None, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def with_stops(self, more: tuple[str, ...]) -> SamplingParams:
        """Adds stop strings to those that are given."""
        if not more:
            return self
        found = self.stops()
        return replace(self, stop=found + [text for text in more if text not in found])

    def typed(self) -> SamplingParams:
        """Turns ``dtype`` into its regular expression; raises ProgramError for a type that has none."""
        if self.dtype is None:
            return self
        name = self.dtype.__name__ if isinstance(self.dtype, type) else {"string": "str"}.get(self.dtype, self.dtype)
        if name not in TYPES:
            raise ProgramError(f"dtype {name} is not known: use one of {', '.join(TYPES)}, or give a regex.")
        if self.regex is not None or self.json_schema is not None:
            raise ProgramError("dtype, regex and json_schema exclude each other: give one of them.")
        regex, stops = TYPES[name]
        return replace(self, dtype=None, regex=regex).with_stops(stops)

    def schema(self) -> str | None:
        """``json_schema`` as a JSON text."""
        return json.dumps(self.json_schema) if isinstance(self.json_schema, dict) else self.json_schema


NAMES = tuple(field.name for field in fields(SamplingParams))
