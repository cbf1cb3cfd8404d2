"""Sampling parameters of a request."""

from __future__ import annotations

import math

import msgspec

from .errors import InvalidRequest
from .grammar import GrammarSpec
from .token_ids import check_ids

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are greedy: with a millionth, logits that differ by 0.0001 are e^100 apart; below 1.2e-38 float32
may flush to 0, and 0 / 0 is NaN."""
_MIN_REPETITION_PENALTY = 1e-6  # logits are divided by it
MAX_BIASED_TOKENS = 1024  # a batch of 256 such requests uploads 2 MB a step


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request, with the names of SGLang's ``sampling_params``.

    ``temperature`` 0 is greedy, less than a millionth becomes 0. ``top_k`` -1 allows all tokens. ``seed`` makes the
    sample reproducible whatever else runs in the batch. ``frequency_penalty`` and ``presence_penalty`` apply to the
    output, ``repetition_penalty`` (1 is none) to prompt and output; ``logit_bias`` is added to the logits of its token
    ids. ``stop`` contains strings and ``stop_regex`` regular expressions (matched on text, by the API server),
    ``stop_token_ids`` and the model's EOS tokens (unless ``ignore_eos``) end a request in the engine. ``grammar``
    constrains the whole output.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)

    @property
    def penalizes(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the parameter, where a value is out of range."""
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, "must be 0 or more"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "must be between 0 and max_new_tokens"),
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "must be -1 (all tokens) or 1 or more"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be between -2 and 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be between -2 and 2"),
            ("repetition_penalty", _MIN_REPETITION_PENALTY <= self.repetition_penalty <= 2,
             f"must be between {_MIN_REPETITION_PENALTY:f} and 2 (1 is none)"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASED_TOKENS, f"must name {MAX_BIASED_TOKENS} tokens at most"),
            ("logit_bias", all(-100 <= v <= 100 for v in self.logit_bias.values()), "must hold values of -100 to 100"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "must fit a signed 64-bit integer"),
            ("stop", all(self.stop), "must not hold empty strings"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise InvalidRequest(f"{name} {rule}, got {_short(getattr(self, name))}.", param=name)
        check_ids(self.logit_bias, vocab_size, "logit_bias")
        check_ids(self.stop_token_ids, vocab_size, "stop_token_ids")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
