"""Samples of a checkpoint's safetensors files: all tensors' names, types and shapes, and some of their content."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..api.errors import ConfigError
from .files import checkpoint_files

MAX_TENSORS = 2048
_SAMPLE_BYTES = 1024
_SAMPLES_PER_TENSOR = 3
_THREADS = 8
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


class StoredTensor(NamedTuple):
    """A tensor's location in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def sample(folder: Path, is_optional: Callable[[str], bool]) -> bytes:
    """Returns the samples of all tensors but the optional ones; raises ConfigError for files that cannot be read."""
    return sample_tensors(_tensors(folder, is_optional))


def sample_tensors(tensors: Sequence[StoredTensor]) -> bytes:
    """Returns the samples of tensors that are sorted by name; raises ConfigError for files that cannot be read."""
    sampled = _select(tensors)
    by_file: defaultdict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in sampled:
        by_file[tensor.file].append(tensor)
    content: dict[str, bytes] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for samples in threads.map(_read, by_file.values()):
            content.update(samples)
    facts = json.dumps([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]).encode()
    return facts + b"".join(content[tensor.name] for tensor in sampled)


def _tensors(folder: Path, is_optional: Callable[[str], bool]) -> list[StoredTensor]:
    """Returns the tensors, sorted by name."""
    tensors = {tensor.name: tensor for file in checkpoint_files(folder) for tensor in read_header(file)}
    return [tensors[name] for name in sorted(tensors) if not is_optional(name)]


def read_header(file: Path) -> list[StoredTensor]:
    """Returns the tensors of a safetensors file; raises ConfigError for one that cannot be read."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            return tensors_of_header(file, size, lambda: content.read(size))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None


def tensors_of_header(file: Path, size: int, read: Callable[[], bytes]) -> list[StoredTensor]:
    """Returns the tensors of a safetensors file whose header has ``size`` bytes, which ``read`` returns. Raises
    ValueError, KeyError, TypeError, AttributeError or IndexError for a damaged one."""
    if size > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    return [StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + size + entry["data_offsets"][0],
                         entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in json.loads(read()).items() if name != "__metadata__"]


def _select(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Returns all tensors, or of too many some of each kind: a tensor's kind is its name without numbers, so that a
    change of one projection of every layer is detected."""
    if len(tensors) <= MAX_TENSORS:
        return list(tensors)
    kinds: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[re.sub(r"\d+", "#", tensor.name)].append(tensor)
    each = max(1, MAX_TENSORS // len(kinds))
    return [tensor for kind in kinds.values() for tensor in _spread(kind, each)]


def _spread(kind: Sequence[StoredTensor], count: int) -> Iterable[StoredTensor]:
    """Returns ``count`` tensors: the first, the last, and others evenly between."""
    if len(kind) <= count:
        return kind
    return [kind[i * (len(kind) - 1) // max(1, count - 1)] for i in range(count)]


def _read(tensors: Sequence[StoredTensor]) -> dict[str, bytes]:
    """Reads the samples of each of one file's tensors."""
    try:
        file = os.open(tensors[0].file, os.O_RDONLY)
        try:
            return {tensor.name: b"".join(os.pread(file, size, offset) for offset, size in _samples(tensor))
                    for tensor in tensors}
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"Cannot read {tensors[0].file}: {error}.") from None


def _samples(tensor: StoredTensor) -> list[tuple[int, int]]:
    """Returns offsets and sizes of the samples, evenly from the first byte to the last; a small tensor is read
    whole."""
    if tensor.num_bytes <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
        return [(tensor.start, tensor.num_bytes)]
    rest = tensor.num_bytes - _SAMPLE_BYTES
    return [(tensor.start + rest * i // (_SAMPLES_PER_TENSOR - 1), _SAMPLE_BYTES) for i in range(_SAMPLES_PER_TENSOR)]
