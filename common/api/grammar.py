"""Grammar specifications of requests, and the vocabulary that grammars are compiled for."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that constrains the whole output; ``text`` is its source (JSON, a regular expression, or EBNF).

    Equal specs compile to equal grammars, so that caches use a spec as their key.
    """

    kind: GrammarKind
    text: str


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The bytes that each token of the model adds to a text, ``token_bytes[token id]``; empty for ids without a token.

    ``special_ids`` are markup such as the beginning of a message; ``stop_ids`` end every answer.
    """

    token_bytes: list[bytes]
    special_ids: list[int]
    stop_ids: list[int]
