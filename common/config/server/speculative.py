"""Flags of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules

if TYPE_CHECKING:
    from ...speculative.base import ProposerFactory

SPECULATIVE_ALGORITHMS: Registry[ProposerFactory] = Registry("speculative algorithm", "baton.common.speculative",
                                                             group="baton.speculative")


@dataclass(frozen=True)
class SpeculativeArgs:
    speculative_algorithm: str | None = flag(None, choices=Choices.of(SPECULATIVE_ALGORITHMS), help=(
        "draft tokens that one step then verifies: NGRAM repeats what followed the same tokens before (a pair's decode "
        "server drafts, its prefill server goes without)"))
    speculative_num_draft_tokens: int = flag(8, help="most tokens that are drafted for a request in one step")
    speculative_ngram_min_match_window_size: int = flag(1, help=(
        "fewest tokens at the end that must have occurred before for NGRAM to draft"))
    speculative_ngram_max_match_window_size: int = flag(12, help="most tokens at the end that NGRAM looks for")

    own_flag_rules: ClassVar[tuple[Rule[SpeculativeArgs], ...]] = (
        Rule(lambda c: not 1 <= c.speculative_ngram_min_match_window_size <= c.speculative_ngram_max_match_window_size,
             "--speculative-ngram-min-match-window-size must be between 1 and "
             "--speculative-ngram-max-match-window-size, not {speculative_ngram_min_match_window_size}."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.speculative.speculative_algorithm and (not c.role.decodes or c.model.is_embedding),
             "--speculative-algorithm is for servers that decode; leave it out here."),
        Rule(lambda c: c.speculative.speculative_algorithm and c.parallel.pp_size > 1,
             "--speculative-algorithm does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.speculative.speculative_algorithm and c.schedule.enable_mixed_chunk,
             "--speculative-algorithm does not draft in mixed chunks: drop --enable-mixed-chunk."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "speculative_num_draft_tokens")
        check_own_rules(self)
