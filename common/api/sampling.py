"""How to choose the next token of a request."""

from __future__ import annotations

import math

import msgspec

from .errors import InvalidRequest
from .grammar import GrammarSpec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request, with the names of SGLang's ``sampling_params``.

    ``temperature`` 0 is greedy. ``top_k`` -1 keeps all tokens. ``seed`` makes the choice reproducible whatever
    else runs in the batch. ``stop`` holds strings (matched on text, by the front process), ``stop_token_ids``
    and the model's EOS tokens (unless ``ignore_eos``) end a request in the engine. ``grammar`` is what the whole output
    obeys.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: GrammarSpec | None = None

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
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "must fit a signed 64-bit integer"),
            ("stop", all(self.stop), "must not hold empty strings"),
            ("stop_token_ids", all(0 <= t < vocab_size for t in self.stop_token_ids),
             f"must hold token ids below the vocabulary size {vocab_size}"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise InvalidRequest(f"{name} {rule}, got {getattr(self, name)!r}.", param=name)
