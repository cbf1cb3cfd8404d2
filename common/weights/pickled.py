"""Tensors as SGLang's clients pickle them (``MultiprocessingSerializer``): on a GPU as handles of its memory.

A pickle calls what it names. Here it may name what rebuilds tensors alone; still, only processes that are trusted with
the server's memory may send one.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

from ..api.errors import InvalidRequest
from .pushed import NamedTensor, split_bucket

_PARAM = "serialized_named_tensors"
_DEVICE_ARGUMENT = 6
"""Where rebuild_cuda_tensor gets the device; SGLang's clients put the GPU's UUID there."""


@dataclass
class _Metadata:
    """A tensor's place in a bucket, as SGLang's FlattenedTensorMetadata."""

    name: str = ""
    shape: Sequence[int] = ()
    dtype: torch.dtype = torch.uint8
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


class _OfRanks:
    """A tensor of each rank, as SGLang's LocalSerializedTensor: a pickle of its own for each."""

    values: Sequence[bytes]


def _rebuild_by_uuid(*args: Any) -> torch.Tensor:
    device = args[_DEVICE_ARGUMENT]
    if isinstance(device, str):
        found = [index for index in range(torch.cuda.device_count())
                 if str(torch.cuda.get_device_properties(index).uuid) == device]
        if not found:
            raise InvalidRequest(f"{_PARAM}: this rank does not see the GPU {device}.", param=_PARAM)
        args = (*args[:_DEVICE_ARGUMENT], found[0], *args[_DEVICE_ARGUMENT + 1:])
    rebuilt: torch.Tensor = reductions.rebuild_cuda_tensor(*args)
    return rebuilt


def _load_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size, ("torch", "device"): torch.device, ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_bytes,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
}
_MODULES = ("torch.multiprocessing.reductions",)
_REBUILDS = ("rebuild_tensor", "rebuild_cuda_tensor", "rebuild_storage_filename", "rebuild_storage_fd",
             "rebuild_storage_empty", "rebuild_typed_storage", "rebuild_typed_storage_child", "rebuild_meta_tensor")
_OF_SGLANG: dict[str, Any] = {"FlattenedTensorMetadata": _Metadata, "LocalSerializedTensor": _OfRanks,
                              "_rebuild_cuda_tensor_modified": _rebuild_by_uuid}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in _MODULES and name in _REBUILDS:
            return getattr(reductions, name)
        if module.split(".")[0] == "sglang" and name in _OF_SGLANG:
            return _OF_SGLANG[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type):
            return getattr(torch, name)
        raise InvalidRequest(f"{_PARAM} has a pickle that names {module}.{name}: it may name what rebuilds tensors "
                             "alone.", param=_PARAM)


def unpickled(content: bytes, rank: int, *, flattened: bool) -> list[NamedTensor]:
    """Returns the tensors of a rank's pickle: pairs of names and tensors, or with ``flattened`` a bucket with its
    metadata. Raises InvalidRequest for anything else."""
    found = _loaded(content)
    try:
        if flattened:
            metadata = found["metadata"]
            bucket = found["flattened_tensor"].flatten().view(torch.uint8)
            return list(split_bucket(bucket, [each.name for each in metadata], [each.dtype for each in metadata],
                                     [tuple(each.shape) for each in metadata]))
        pairs = found.items() if isinstance(found, dict) else found
        return [(str(name), _of_rank(tensor, rank)) for name, tensor in pairs]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidRequest(f"{_PARAM} has a pickle of another form than names with tensors ({error!r}).",
                             param=_PARAM) from None


def _of_rank(value: Any, rank: int) -> torch.Tensor:
    if isinstance(value, _OfRanks):
        value = _loaded(value.values[rank])
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(value).__name__} is no tensor")
    return value.detach()


def _loaded(content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, TypeError, ValueError, AttributeError,
            ImportError, IndexError) as error:
        raise InvalidRequest(f"{_PARAM} has a pickle that cannot be read: {error}.", param=_PARAM) from None
