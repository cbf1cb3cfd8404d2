"""Prompts' steps in two halves, behind one of which the exchanges of the other are hidden."""

from __future__ import annotations

import numpy as np

from ..api.errors import ConfigError
from ..attention.base import AttentionPlanner
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..distributed.token_exchange import TokenExchange
from ..forward.forward_batch import ForwardBatch, indptr_of, part_of
from ..models.causal_lm import CausalLM
from ..models.micro_batches import MicroBatch
from .dp_sync import DPStepInfo


class TwoBatchOverlap:
    """Cuts a step into halves of as many tokens, a request in two where the middle is within it: its second part
    attends to the first, which is stored before. All ranks cut the same steps: those in which every attention group
    computes prompts or has no work; one without takes part with a row in either half."""

    def __init__(self, attentions: tuple[AttentionPlanner, AttentionPlanner],
                 exchanges: tuple[TokenExchange, TokenExchange], page_size: int, group: int, least: int):
        """``group``: this rank's attention group. ``least``: tokens of one from which its step is cut."""
        self._attentions = attentions
        self._exchanges = exchanges
        self._page_size = page_size
        self._group = group
        self._least = least
        self._middle = 0

    @classmethod
    def of(cls, config: ServerConfig, parallel: Parallel, model: CausalLM,
           attentions: tuple[AttentionPlanner, AttentionPlanner]) -> TwoBatchOverlap:
        """A rank's. Raises ConfigError."""
        if not model.halves:
            raise ConfigError("--enable-two-batch-overlap is for --moe-a2a-backend none, and for MLPs without a bias: "
                              "leave it out.")
        return cls(attentions, (parallel.exchange_beside(), parallel.exchange_beside()), config.cache.page_size,
                   parallel.dp_rank, config.data_parallel.two_batch_min_tokens)

    def begin(self, turn: DPStepInfo) -> bool:
        """Whether this turn's step is cut."""
        if turn.fewest < self._least:
            return False
        # Even, so that pointers to the second half's rows are aligned as kernels were compiled for.
        first = [max(count // 4 * 2, 1) for count in turn.tokens]
        second = [max(count - before, 1) for count, before in zip(turn.tokens, first)]
        for exchange, counts in zip(self._exchanges, (first, second)):
            exchange.begin(counts)
        self._middle = first[self._group]
        return all(exchange.padded for exchange in self._exchanges)

    def plan(self, batch: ForwardBatch) -> list[MicroBatch]:
        """The halves of this turn's batch, which is cut."""
        bounds = ((0, self._middle), (self._middle, batch.num_tokens))
        for attention, (begin, end) in zip(self._attentions, bounds):
            attention.plan(rows_of(batch, begin, end, self._page_size))
        return [MicroBatch(begin, end, attention, tokens)
                for (begin, end), attention, tokens in zip(bounds, self._attentions, self._exchanges)]


def rows_of(batch: ForwardBatch, begin: int, end: int, page_size: int) -> ForwardBatch:
    """Token rows ``begin:end`` of ``batch`` as a batch of their own, which is not to be scored."""
    starts, ends = batch.qo_indptr_cpu[:-1], batch.qo_indptr_cpu[1:]
    requests = np.flatnonzero((starts < end) & (ends > begin))
    starts, ends = starts[requests], ends[requests]
    pages = np.diff(batch.kv_indptr_cpu)[requests]
    lengths = (pages - 1) * page_size + batch.kv_last_page_len_cpu[requests] - np.maximum(ends - end, 0)
    pages = -(lengths // -page_size)
    return part_of(batch, slice(begin, end), requests, indptr_of(np.minimum(ends, end) - np.maximum(starts, begin)),
                   pages, (lengths - (pages - 1) * page_size).astype(np.int32), is_decode=batch.is_decode)
