"""Schemes of compressed-tensors with weights in 4 or 8 bits and activations that are not quantized (W4A16, W8A16)."""

from __future__ import annotations

from ..api.errors import ConfigError
from ..config.quantization import COMPRESSED_GROUPS, CompressedGroup
from .packed_int_format import PackedIntFormat, StoredInts, StoredTensor

STORED = StoredInts(StoredTensor("weight_packed", True, "inputs"), StoredTensor("weight_scale", True),
                    StoredTensor("weight_zero_point", True, "outputs"), "weight_g_idx", shape="weight_shape")


@COMPRESSED_GROUPS.register("packed ints")
def read(group: CompressedGroup) -> PackedIntFormat | None:
    weights = group.weights
    if group.inputs is not None or weights.get("type") != "int":
        return None
    if group.storage != "pack-quantized":
        raise ConfigError(f"Integer weights in the format {group.storage!r} of compressed-tensors are not supported: "
                          "use a checkpoint in 'pack-quantized'.")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "channel"):
        raise ConfigError(f"Integer weights quantized by {strategy!r} are not supported: use a checkpoint with the "
                          "strategy 'group' or 'channel'.")
    order = weights.get("actorder")
    return PackedIntFormat(int(weights.get("num_bits") or 0), int(size) if size and strategy == "group" else -1,
                           bool(weights.get("symmetric", True)), STORED, order is True or order in ("group", "dynamic"))
