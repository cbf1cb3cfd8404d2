"""The grammar backend of xgrammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xgrammar

from ..config.server.answers import GRAMMAR_BACKENDS
from .backend import FillTogether
from .xgrammar_compiler import Compiler


@GRAMMAR_BACKENDS.register("xgrammar", needs={"xgrammar": "xgrammar"})
class XGrammarBackend:
    compiler = Compiler

    @staticmethod
    def state(compiled: xgrammar.CompiledGrammar) -> xgrammar.GrammarMatcher:
        return xgrammar.GrammarMatcher(compiled)

    @staticmethod
    def fill_together(max_threads: int) -> FillTogether:
        batch = xgrammar.BatchGrammarMatcher(max_threads=max_threads)

        def fill(states: Sequence[xgrammar.GrammarMatcher], words: np.ndarray, rows: Sequence[int]) -> None:
            batch.batch_fill_next_token_bitmask(list(states), words, list(rows))

        return fill
