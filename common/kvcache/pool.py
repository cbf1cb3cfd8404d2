"""Memory of the KV pool: one tensor a layer group, in the shape that layout.py describes."""

from __future__ import annotations

import math

import torch

from ..shared_memory.host import shared_bytes
from .layout import KVLayout, shape_of_group


class KVPool:
    """Owns the memory of ``num_pages`` pages on one device.

    ``groups[g]`` is ``[num_pages, layers_in_group, planes, num_kv_heads, page_size, head_dim]``, contiguous and zeroed:
    attention kernels read whole pages and mask by weight, and 0 * NaN of uninitialised memory would be NaN.
    ``shared``: processes of this host can map the memory (always true of a GPU; shared_memory/host.py does it for a
    CPU).
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device | str, *, shared: bool = False):
        self.layout = layout
        self.num_pages = num_pages
        zeros = _shared_zeros if shared and torch.device(device).type == "cpu" else torch.zeros
        self.groups: list[torch.Tensor] = [
            zeros(tuple(shape_of_group(layout, group, num_pages)), dtype=getattr(torch, layout.dtype), device=device)
            for group in range(len(layout.groups))
        ]
        self._layers = [self._views(layer) for layer in range(layout.num_layers)]

    def _views(self, layer: int) -> tuple[torch.Tensor, ...]:
        group, index = self.layout.locate(layer)
        return self.groups[group][:, index].unbind(1)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value pages of one layer, each a strided view ``[num_pages, num_kv_heads, page_size, head_dim]``."""
        keys, values = self._layers[layer]
        return keys, values

    def latents(self, layer: int) -> torch.Tensor:
        """A layer's pages of latents, a strided view ``[num_pages, page_size, head_dim]``."""
        (pages,) = self._layers[layer]
        return pages[:, 0]

    def states(self, layer: int) -> torch.Tensor:
        """A layer's states, a strided view ``[num_pages, num_kv_heads, page_size * head_dim]``."""
        (pages,) = self._layers[layer]
        return pages.flatten(2)

    def regions(self) -> list[tuple[int, int, int]]:
        """``(address, nbytes, device)`` of each group's memory, for registration with a transfer engine.

        The device is a GPU's index, -1 for host memory.
        """
        return [(group.data_ptr(), group.nbytes, group.get_device()) for group in self.groups]

    def __repr__(self) -> str:
        nbytes = sum(group.nbytes for group in self.groups)
        return f"KVPool({self.num_pages} pages, {len(self.groups)} groups, {nbytes / 2**30:.2f} GiB)"


def _shared_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(shared_bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
