"""NGRAM: what followed the last tokens where they occurred before is drafted again. It needs no draft model.

By default it looks in all requests that the server has run or is running. Prompt lookup, in the request's own tokens
alone, is Saxena's method (https://github.com/apoorvumang/prompt-lookup-decoding, 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ..api.drafts import Drafts
from ..config.server import ServerConfig
from ..config.server.speculative import SPECULATIVE_ALGORITHMS, SpeculativeArgs
from ..request.req import Req
from .base import Algorithm, Proposer
from .ngram_corpus import NgramCorpus, read_corpus
from .ngram_index import WAYS, Match, NgramIndex
from .ngram_tree import tree_of

logger = logging.getLogger(__name__)


class OwnNgramProposer:
    """Looks n-grams of ``min_window`` to ``max_window`` tokens up in a request's prompt and output."""

    def __init__(self, args: SpeculativeArgs):
        self._min_window = args.speculative_ngram_min_match_window_size
        self._max_window = args.speculative_ngram_max_match_window_size
        self._max_depth = args.speculative_ngram_max_trie_depth

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Drafts | None]:
        found = [continuation(req.tokens.view(), self._min_window, self._max_window, min(limit, self._max_depth))
                 for req, limit in zip(reqs, limits)]
        return [Drafts(tuple(tokens)) if tokens else None for tokens in found]

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None:
        """Does nothing: the tokens themselves are the only state."""

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Does nothing."""


class NgramProposer:
    """Looks n-grams up in the tokens of all requests of the same namespace, and in those of a ``corpus``."""

    def __init__(self, args: SpeculativeArgs, corpus: NgramCorpus | None = None):
        self._args = args
        self._corpus = corpus
        self._most = min(WAYS, args.speculative_ngram_max_bfs_breadth)
        self._index = NgramIndex(args.speculative_ngram_min_match_window_size,
                                 args.speculative_ngram_max_match_window_size, args.speculative_ngram_capacity)

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Drafts | None]:
        depths = [min(limit, self._args.speculative_ngram_max_trie_depth) for limit in limits]
        most = WAYS if self._most > 1 else 1
        matches = self._index.match(reqs, depths, most)
        if self._corpus is not None:
            matches = list(map(_longer, matches, self._corpus.match(reqs, depths, most)))
        return [None if match is None else self._drafts(match, limit) for match, limit in zip(matches, limits)]

    def _drafts(self, match: Match, limit: int) -> Drafts | None:
        if self._most == 1:
            return Drafts(tuple(match.continuations[0]))
        return tree_of(match.continuations, self._breadth(match.length), limit,
                       by_frequency=self._args.speculative_ngram_match_type == "PROB")

    def _breadth(self, length: int) -> int:
        """Returns how many tokens are drafted for a place after a match: the fewer, the longer it is."""
        args = self._args
        shortest, longest = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
        share = (length - shortest) / max(1, longest - shortest)
        fewest, most = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
        return round(most - (most - fewest) * share)

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None:
        """Does nothing: the tokens themselves are the only state."""

    def on_end(self, reqs: Sequence[Req]) -> None:
        self._index.end(reqs)


def _longer(own: Match | None, of_corpus: Match | None) -> Match | None:
    """Returns the longer match; of equal ones what followed in both, in requests first."""
    if own is None or of_corpus is None:
        return own or of_corpus
    if own.length == of_corpus.length:
        return Match(own.length, [*own.continuations, *of_corpus.continuations][:WAYS])
    return max(own, of_corpus, key=lambda match: match.length)


def make_proposer(config: ServerConfig) -> Proposer:
    """Makes the proposer that the flags ask for. Raises ConfigError for a corpus that cannot be read."""
    args = config.speculative
    if not args.speculative_ngram_capacity:
        return OwnNgramProposer(args)
    corpus = None
    if args.speculative_ngram_external_corpus_path is not None:
        corpus = read_corpus(args, config.model)
        logger.info("NGRAM drafts from %s tokens of %s, too", corpus.num_tokens,
                    args.speculative_ngram_external_corpus_path)
    return NgramProposer(args, corpus)


def continuation(tokens: np.ndarray, min_window: int, max_window: int, limit: int) -> list[int]:
    """Returns up to ``limit`` tokens that followed the longest suffix of ``tokens`` [n] that occurs before; none where
    that is shorter than ``min_window``. Of several occurrences it is the last one that ``limit`` tokens follow."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = min(len(ends), 1)
    while length and length < max_window:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < min_window or limit <= 0:
        return []
    followed = ends[ends + limit <= last]
    start = int(followed[-1] if len(followed) else ends[0]) + 1
    found: list[int] = tokens[start:start + limit].tolist()
    return found


SPECULATIVE_ALGORITHMS.register("NGRAM")(Algorithm(make_proposer=make_proposer))
