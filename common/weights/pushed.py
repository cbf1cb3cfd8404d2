"""Tensors in the forms in which trainers send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..api.errors import InvalidRequest

NamedTensor = tuple[str, torch.Tensor]


def dtype_of(name: str) -> torch.dtype:
    """Returns the type of a name, "bfloat16" or "torch.bfloat16"; raises InvalidRequest for others."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequest(f"dtypes: torch has no type {name!r}; give names such as bfloat16.", param="dtypes")
    return found


def from_safetensors(content: bytes) -> list[NamedTensor]:
    """Decodes a safetensors file's bytes; raises InvalidRequest for others."""
    try:
        return list(load(content).items())
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidRequest(f"serialized_named_tensors has an entry that is not in safetensors' format ({error}): "
                             "send base64 of safetensors.torch.save(tensors).",
                             param="serialized_named_tensors") from None


def split_bucket(bucket: torch.Tensor, names: Sequence[str], dtypes: Sequence[torch.dtype],
                 shapes: Sequence[Sequence[int]]) -> Iterator[NamedTensor]:
    """Yields the tensors whose bytes follow each other in ``bucket`` (uint8)."""
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes):
        stop = start + num_bytes(dtype, shape)
        part = bucket[start:stop]
        if start % dtype.itemsize:
            part = part.clone()
        yield name, part.view(dtype).view(*shape)
        start = stop


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor."""
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
