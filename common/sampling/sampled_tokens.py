"""The tokens of a step that tells nothing beside them."""

from __future__ import annotations

import torch

from .sampler import SamplerOutput

_SLOTS = 4  # steps whose tokens may be on their way; two are in flight at most
_LEAST = 256


class TokensOnDevice:
    """As ``Launched``: ``tokens`` [R] int64 live on the device, and ``wait`` brings them to the host."""

    def __init__(self, tokens: torch.Tensor, slot: _Slot | None):
        """``slot``: where a copy of them arrives; None where they are on the host."""
        self.tokens = tokens
        self._slot = slot
        self._token_ids: list[int] | None = None

    def token_ids(self) -> list[int]:
        """Wait for the tokens alone."""
        if self._token_ids is None:
            self._token_ids = self.tokens.tolist() if self._slot is None else self._slot.wait(len(self.tokens))
        return self._token_ids

    def wait(self) -> SamplerOutput:
        token_ids = self.token_ids()
        return SamplerOutput(token_ids, [None] * len(token_ids), {})


class SampledTokens:
    """Takes the tokens of steps to the host, in pinned memory that steps use in turn: asking for such memory in every
    step takes longer than the copy."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._users: list[TokensOnDevice | None] = [None] * _SLOTS
        self._turn = 0

    def of(self, tokens: torch.Tensor) -> TokensOnDevice:
        """``tokens`` [R] int64, which may change once the next step is launched."""
        if not tokens.is_cuda:
            return TokensOnDevice(tokens, None)
        turn = self._turn = (self._turn + 1) % _SLOTS
        user = self._users[turn]
        if user is not None:
            user.token_ids()  # whoever has not looked yet finds them all the same
        while len(self._slots) < _SLOTS:
            self._slots.append(_Slot())
        slot = self._slots[turn]
        slot.send(tokens)
        chosen = self._users[turn] = TokensOnDevice(tokens, slot)
        return chosen


class _Slot:
    def __init__(self) -> None:
        self._memory = torch.empty(_LEAST, dtype=torch.int64, pin_memory=True)
        self._there = torch.cuda.Event()

    def send(self, tokens: torch.Tensor) -> None:
        if len(tokens) > len(self._memory):
            self._memory = torch.empty(2 * len(tokens), dtype=torch.int64, pin_memory=True)
        self._memory[:len(tokens)].copy_(tokens, non_blocking=True)
        self._there.record()

    def wait(self, count: int) -> list[int]:
        self._there.synchronize()
        return self._memory[:count].tolist()
