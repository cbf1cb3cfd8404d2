"""What an answer must look like, as a request states it, and the tokens that it can be made of."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that the whole output obeys; ``text`` is its source (JSON, a regular expression, or EBNF).

    Equal specs compile to equal grammars, so that a spec is the key of caches.
    """

    kind: GrammarKind
    text: str


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The bytes that each token of the model adds to a text, ``pieces[token id]``; empty for ids without a token.

    ``special_ids`` are markup such as the beginning of a message; ``stop_ids`` end every answer.
    """

    pieces: list[bytes]
    special_ids: list[int]
    stop_ids: list[int]
