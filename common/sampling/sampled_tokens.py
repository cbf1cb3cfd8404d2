"""Sampled tokens, and the pinned buffers for their copies to the host."""

from __future__ import annotations

import threading

import torch

_NUM_BUFFERS = 4
"""Steps whose tokens may be in transit without a wait."""
_MIN_BUFFER_TOKENS = 256


class SampledTokens:
    """A step's sampled tokens: ``tokens`` [R] int64 on the device, and their copy on its way to the host."""

    def __init__(self, tokens: torch.Tensor, buffer: _PinnedBuffer | None):
        """``buffer`` receives a copy of them; None where they are on the host."""
        self.tokens = tokens
        self._buffer = buffer
        self._token_ids: list[int] | None = None
        self._lock = threading.Lock()  # another thread may wait while the buffer is about to be reused

    def token_ids(self) -> list[int]:
        """Waits for the tokens."""
        with self._lock:
            if self._token_ids is None:
                self._token_ids = self.tokens.tolist() if self._buffer is None else self._buffer.wait(len(self.tokens))
            return self._token_ids


class SampledTokenBuffers:
    """Copies the tokens of steps to the host, into pinned buffers that steps use in turn: allocating pinned memory in
    every step takes longer than the copy."""

    def __init__(self) -> None:
        self._buffers: list[_PinnedBuffer] = []
        self._users: list[SampledTokens | None] = [None] * _NUM_BUFFERS
        self._current = 0

    def copy(self, tokens: torch.Tensor) -> SampledTokens:
        """Starts to copy ``tokens`` [R] int64, which may change once the next step is launched."""
        if not tokens.is_cuda:
            return SampledTokens(tokens.clone(), None)
        current = self._current = (self._current + 1) % _NUM_BUFFERS
        user = self._users[current]
        if user is not None:
            user.token_ids()  # reads them before the buffer is overwritten
        while len(self._buffers) < _NUM_BUFFERS:
            self._buffers.append(_PinnedBuffer())
        buffer = self._buffers[current]
        buffer.copy_from(tokens)
        sampled = self._users[current] = SampledTokens(tokens, buffer)
        return sampled


class _PinnedBuffer:
    """Written inside and outside of inference mode, so that its memory must be no inference tensor."""

    def __init__(self) -> None:
        self._memory = _pinned(_MIN_BUFFER_TOKENS)
        self._copied = torch.cuda.Event()

    def copy_from(self, tokens: torch.Tensor) -> None:
        if len(tokens) > len(self._memory):
            self._memory = _pinned(2 * len(tokens))
        self._memory[:len(tokens)].copy_(tokens, non_blocking=True)
        self._copied.record()

    def wait(self, count: int) -> list[int]:
        self._copied.synchronize()
        return self._memory[:count].tolist()


def _pinned(count: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.int64, pin_memory=True)
