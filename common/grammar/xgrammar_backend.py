"""The grammar backend of xgrammar."""

from __future__ import annotations

from ..config.server.answers import GRAMMAR_BACKENDS
from .compiler import Compiler
from .masks import MaskFiller
from .matcher import Matcher


@GRAMMAR_BACKENDS.register("xgrammar", needs={"xgrammar": "xgrammar"})
class XGrammarBackend:
    compiler = Compiler
    matcher = Matcher
    filler = MaskFiller
