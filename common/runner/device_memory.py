"""Device memory that can be freed and allocated again while its tensors, and all views of them, stay."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class DeviceMemory:
    """The storages of some tensors. ``release`` frees them; with ``keep`` their content moves to host memory.

    Views refer to their storage, not to its address, so that after ``resume`` they are valid again. What recorded
    addresses (CUDA graphs, a transfer library's registration) must do so again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool):
        self._storages = list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
        self._keep = keep
        self._sizes: list[int] = []
        self._host_copies: list[torch.Tensor] = []

    @property
    def released(self) -> bool:
        return bool(self._sizes)

    @torch.no_grad()
    def release(self) -> None:
        assert not self.released
        for storage in self._storages:
            if self._keep:
                self._host_copies.append(_bytes_of(storage).cpu().clone())
            self._sizes.append(storage.nbytes())
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def resume(self) -> None:
        """Allocates the storages again. Raises torch.OutOfMemoryError without enough memory; then none is resumed."""
        assert self.released
        done = 0
        try:
            for storage, size in zip(self._storages, self._sizes):
                storage.resize_(size)
                done += 1
        except torch.OutOfMemoryError:
            for storage in self._storages[:done]:
                storage.resize_(0)
            raise
        for index, storage in enumerate(self._storages):
            if self._keep:
                _bytes_of(storage).copy_(self._host_copies[index])
            else:
                _bytes_of(storage).zero_()
        self._sizes, self._host_copies = [], []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
