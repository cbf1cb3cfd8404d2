"""Shape of the KV pool: pages first, a group of layers together within a page.

``pool[group]: [num_pages, layers_in_group, planes, num_kv_heads, page_size, head_dim]``. There are two planes, keys and
values, or one, of latents: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) stores one vector a token
in each layer, ``head_dim = kv_lora_rank + qk_rope_head_dim`` wide, that all heads read, so that every rank stores it.
A page of one group is contiguous, so that a transfer needs one descriptor for it: a descriptor costs
about 6 us over NIXL whatever its size, and reaches 155 GB/s at 1 MiB but 11 GB/s at 64 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

TARGET_DESCRIPTOR_BYTES = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""Bounds on the numbers of a peer's layout: a zero or a billion would crash, or keep busy, the server that compares
them."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class KVLayout(msgspec.Struct, frozen=True):
    """Layout of one rank's pool; also the fingerprint that two servers compare in their handshake.

    ``num_kv_heads`` counts this rank's heads; latents are one, whatever the number of ranks. ``groups`` lists the
    number of layers of each layer group. ``scales`` are those of a pool in float8, ``(keys', values')`` of each layer:
    a stored value times its scale is the value. An empty tuple means scales of one.

    With the form ``state`` (state_group.py) a page is no tokens' but a state: each of its ``num_kv_heads`` parts has
    ``page_size * head_dim`` values, the last of which may be unused.

    A pipeline stage has the layers from ``first_layer`` on, of a model of ``of_layers``; 0 means that the pool has
    all layers. Layer numbers count from the pool's first.

    ``windows`` are the layers' sliding windows, see ``ModelSpec``. They are part of the layout because keys and values
    computed after a windowed layer are of no use to a server with a larger window.

    A pool may have the layers of one cache group only (cache_group.py): ``layers`` are their numbers in the model, and
    ``first_layer``, ``of_layers`` count the model's layers of this group. Of a request it has the pages that a token
    reads which sees the last ``retained_tokens`` tokens, its own included; None: all pages.

    ``channel_order`` is the digest of the order in which keys' channels are stored (channel_order.py), empty for the
    model's own.
    """

    groups: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=4096)]
    num_kv_heads: Count
    head_dim: Count
    page_size: Count
    dtype: str
    form: Literal["heads", "latent", "state"] = "heads"
    scales: tuple[tuple[float, float], ...] = ()
    first_layer: Annotated[int, msgspec.Meta(ge=0)] = 0
    of_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    windows: tuple[int | None, ...] = ()
    layers: tuple[int, ...] = ()
    retained_tokens: Count | None = None
    channel_order: str = ""

    def __post_init__(self) -> None:
        if any(len(entries) not in (0, self.num_layers) for entries in (self.scales, self.windows, self.layers)):
            raise ValueError("scales, windows and layers must have an entry for every layer, or none")

    def number_of(self, layer: int) -> int:
        """The number in the model of a layer of the pool."""
        return self.layers[layer] if self.layers else self.first_layer + layer

    def first_retained_token(self, num_tokens: int) -> int:
        """The first token whose keys and values are read by tokens after the first ``num_tokens``, where the pool does
        not have all pages; else 0."""
        return 0 if self.retained_tokens is None else max(0, num_tokens + 1 - self.retained_tokens)

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer attends to, as its model states it; None for all."""
        return self.windows[layer] if self.windows else None

    def scales_of(self, layer: int) -> tuple[float, float]:
        """``(keys', values')`` of a layer."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    @property
    def planes(self) -> int:
        """Vectors that a head stores for a token: its key and its value, or the one latent."""
        return 2 if self.form == "heads" else 1

    @property
    def num_layers(self) -> int:
        return sum(self.groups)

    @property
    def model_layers(self) -> int:
        """Layers of the whole model; the pool may have a part of them."""
        return self.of_layers or self.num_layers

    def group_page_bytes(self, group: int) -> int:
        """Bytes of one page of one layer group: the size of a transfer descriptor."""
        return self.groups[group] * self.layer_page_bytes

    @property
    def layer_page_bytes(self) -> int:
        return self.planes * self.num_kv_heads * self.page_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return sum(self.group_page_bytes(g) for g in range(len(self.groups)))

    def locate(self, layer: int) -> tuple[int, int]:
        """``(group, index within the group)`` of a layer."""
        for group, size in enumerate(self.groups):
            if layer < size:
                return group, layer
            layer -= size
        raise IndexError("layer beyond the model's last")

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def split_layers(num_layers: int, layer_page_bytes: int, num_groups: int | None = None) -> tuple[int, ...]:
    """Layers of each group, as even as possible; by default the number of groups makes a page of one about 1 MiB."""
    if num_groups is None:
        num_groups = round(num_layers * layer_page_bytes / TARGET_DESCRIPTOR_BYTES)
    num_groups = max(1, min(num_groups, num_layers))
    small, larger = divmod(num_layers, num_groups)
    return tuple(small + (g < larger) for g in range(num_groups))


def shape_of_group(layout: KVLayout, group: int, num_pages: int) -> Sequence[int]:
    return (num_pages, layout.groups[group], layout.planes, layout.num_kv_heads, layout.page_size, layout.head_dim)
