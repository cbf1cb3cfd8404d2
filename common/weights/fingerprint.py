"""A checkpoint's fingerprint: equal for copies of it, however they are split into files, different for other weights.

It covers what config.json says of the computation, all tensors' names, types and shapes, and samples of their content:
three samples of 1 KiB of up to 2,048 tensors, among them every kind of tensor of a layer. So it describes the whole
model on every rank, however it is sharded, and costs the same for 1 GB and for 234: 0.8 s for 30,720 tensors in 40
files, most of it for their headers. It cannot detect weights that differ in a few rows only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..api.errors import ConfigError
from ..api.identity import ModelIdentity
from ..config.checkpoint import resolve_checkpoint
from ..config.model import ModelSpec
from ..config.server import ModelArgs
from .files import checkpoint_files
from .kv_scales import is_kv_scale

MAX_TENSORS = 2048
_SAMPLE_BYTES = 1024
_SAMPLES_PER_TENSOR = 3
_THREADS = 8
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_SERVER_FIELDS = ("dtype", "eos_token_ids", "context_length", "quantization")
"""Fields of ModelSpec that describe how a server runs a model, or its API; a checkpoint in float8 differs by its
tensors."""
_STATED_OF_ALL = {"attention_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
"""Facts that are part of every model's fingerprint, also where its family does not have them."""


class _Tensor(NamedTuple):
    """A tensor's location in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def identify(args: ModelArgs, spec: ModelSpec, updates: int = 0) -> ModelIdentity:
    """Computes the identity of the weights that ``args`` name; raises ConfigError for files that cannot be read."""
    source = args.model_path if args.revision is None else f"{args.model_path}@{args.revision}"
    if args.model_fingerprint is not None:
        return ModelIdentity(args.model_fingerprint, source, updates)
    digest = hashlib.sha256(_facts(spec))
    if args.load_format == "dummy":
        source = f"{source} with dummy weights of seed {args.random_seed}"
        digest.update(f"dummy {args.random_seed}".encode())
    else:
        _add_tensors(digest, _tensors(resolve_checkpoint(args), spec))
    return ModelIdentity(digest.hexdigest()[:16], source, updates)


def _facts(spec: ModelSpec) -> bytes:
    """Encodes the fields that differ from their defaults: a release with more fields gets the same for older models."""
    facts = {**_STATED_OF_ALL, **spec.facts()}
    for name in _SERVER_FIELDS:
        facts.pop(name, None)
    return json.dumps(facts, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)
                if getattr(value, field.name) != field.default}
    return repr(value)


def _tensors(folder: Path, spec: ModelSpec) -> list[_Tensor]:
    """Returns all tensors that the model consists of, sorted by name."""
    tensors = {tensor.name: tensor for file in checkpoint_files(folder) for tensor in _read_header(file)}
    return [tensors[name] for name in sorted(tensors) if not _is_optional(name, spec)]


def _is_optional(name: str, spec: ModelSpec) -> bool:
    """Returns whether some copies of a model lack the tensor. A KV cache's scales are compared with its layout."""
    return (name.endswith("rotary_emb.inv_freq") or is_kv_scale(name) or name.startswith(spec.unused_names)
            or (spec.tie_word_embeddings and name == "lm_head.weight"))


def _read_header(file: Path) -> list[_Tensor]:
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(content.read(size))
            return [_Tensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + size + entry["data_offsets"][0],
                            entry["data_offsets"][1] - entry["data_offsets"][0])
                    for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from None


def _add_tensors(digest: hashlib._Hash, tensors: Sequence[_Tensor]) -> None:
    digest.update(json.dumps([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]).encode())
    sampled = _select(tensors)
    by_file: defaultdict[Path, list[_Tensor]] = defaultdict(list)
    for tensor in sampled:
        by_file[tensor.file].append(tensor)
    content: dict[str, bytes] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for samples in threads.map(_read, by_file.values()):
            content.update(samples)
    for tensor in sampled:
        digest.update(content[tensor.name])


def _select(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """Returns all tensors, or of too many some of each kind: a tensor's kind is its name without numbers, so that a
    change of one projection of every layer is detected."""
    if len(tensors) <= MAX_TENSORS:
        return list(tensors)
    kinds: defaultdict[str, list[_Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[re.sub(r"\d+", "#", tensor.name)].append(tensor)
    each = max(1, MAX_TENSORS // len(kinds))
    return [tensor for kind in kinds.values() for tensor in _spread(kind, each)]


def _spread(kind: Sequence[_Tensor], count: int) -> Iterable[_Tensor]:
    """Returns ``count`` tensors: the first, the last, and others evenly between."""
    if len(kind) <= count:
        return kind
    return [kind[i * (len(kind) - 1) // max(1, count - 1)] for i in range(count)]


def _read(tensors: Sequence[_Tensor]) -> dict[str, bytes]:
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


def _samples(tensor: _Tensor) -> list[tuple[int, int]]:
    """Returns offsets and sizes of the samples, evenly from the first byte to the last; a small tensor is read
    whole."""
    if tensor.num_bytes <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
        return [(tensor.start, tensor.num_bytes)]
    rest = tensor.num_bytes - _SAMPLE_BYTES
    return [(tensor.start + rest * i // (_SAMPLES_PER_TENSOR - 1), _SAMPLE_BYTES) for i in range(_SAMPLES_PER_TENSOR)]
