"""What an answer must look like, as a request states it."""

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
