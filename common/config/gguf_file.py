"""Headers of GGUF files (ggml's ``gguf.md``, versions 2 and 3): metadata, and where tensors are. No torch."""

from __future__ import annotations

import functools
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.gguf_blocks import BLOCKS
from ..api.errors import ConfigError

_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_BLOCKS = {block.number: (name, block) for name, block in BLOCKS.items()}
_OTHERS = {15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
           23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
           39: "MXFP4"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of ``shape`` (rows first, as torch has it), whose ``num_bytes`` bytes begin at ``start`` of ``file``.
    ``kind`` is F32, F16, BF16 or a quantized type."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The metadata of a model, and its tensors by their names."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the metadata of a key below the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def gguf_files(path: Path) -> list[Path]:
    """Returns all parts of a model of which ``path`` is one; raises ConfigError where one is missing."""
    if not (match := _PART.fullmatch(path.name)):
        return [path]
    count = int(match[3])
    files = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ConfigError(f"{path.parent} lacks {', '.join(missing[:3])}, of the {count} parts of a GGUF file.")
    return files


def find_gguf(path: Path) -> Path | None:
    """Returns a GGUF file: ``path`` itself, or the only model of a folder; None where there is none. Raises ConfigError
    where a folder has several."""
    if path.suffix == ".gguf":
        return path
    found = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    models = [file for file in found if not (match := _PART.fullmatch(file.name)) or int(match[2]) == 1]
    if len(models) > 1:
        raise ConfigError(f"{path} holds several GGUF files ({', '.join(file.name for file in models[:3])}): let "
                          "--model-path name one of them.")
    return models[0] if models else None


def read_gguf(path: Path) -> GgufFile:
    """Reads the headers of a model's file, and of its other parts; raises ConfigError."""
    files = gguf_files(path)
    try:
        parts = [_read(file, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    return GgufFile(parts[0].metadata, {name: tensor for part in parts for name, tensor in part.tensors.items()})


@functools.lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> GgufFile:
    """Reads a file that was ``changed`` at this time: its vocabulary takes a tenth of a second, and several ask."""
    with file.open("rb") as content:
        if not file.stat().st_size:
            raise ConfigError(f"Cannot read {file}: it is empty.")
        with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                return _Header(file, mapped).read()
            except (struct.error, UnicodeDecodeError, IndexError, OverflowError, MemoryError) as error:
                raise ConfigError(f"Cannot read {file}: its header is damaged ({error}).") from None


class _Header:
    """Reads a header from its beginning on."""

    def __init__(self, file: Path, content: mmap.mmap):
        self._file, self._content, self._at = file, content, 0

    def read(self) -> GgufFile:
        if self._content[:4] != b"GGUF":
            raise ConfigError(f"Cannot read {self._file}: it is no GGUF file.")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ConfigError(f"Cannot read {self._file}: its version of GGUF is {version}; 2 and 3 in little-endian "
                              "order are read.")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_keys):
            name = self._string()
            metadata[name] = self._value(self._number("I"))
        infos = [(self._string(), tuple(self._number("Q") for _ in range(self._number("I"))), self._number("I"),
                  self._number("Q")) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        return GgufFile(metadata, {name: self._tensor(name, sizes, kind, data + offset)
                                   for name, sizes, kind, offset in infos})

    def _tensor(self, name: str, sizes: tuple[int, ...], number: int, start: int) -> GgufTensor:
        shape, count = sizes[::-1], 1
        for size in shape:
            count *= size
        if number in _PLAIN:
            kind, itemsize = _PLAIN[number]
            num_bytes = count * itemsize
        elif number in _BLOCKS:
            kind, block = _BLOCKS[number]
            if shape[-1] % block.values:
                raise ConfigError(f"{name} in {self._file.name} has rows of {shape[-1]} values, no whole blocks of "
                                  f"{kind}.")
            num_bytes = block.row_bytes(count)
        else:
            raise ConfigError(f"{name} in {self._file.name} is of the type {_OTHERS.get(number, number)}: use a file "
                              f"whose types are among F32, F16, BF16, {', '.join(BLOCKS)}, such as a Q4_K_M one.")
        if start + num_bytes > len(self._content):
            raise ConfigError(f"Cannot read {self._file}: it ends within {name}.")
        return GgufTensor(name, kind, shape, self._file, start, num_bytes)

    def _number(self, code: str) -> Any:
        value, = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        size = self._number("Q")
        if self._at + size > len(self._content):
            raise IndexError("a string is longer than the file")
        self._at += size
        return self._content[self._at - size:self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise IndexError(f"values have no type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self._content, self._at)
        self._at += struct.calcsize(code)
        return list(values)


def read_floats(tensor: GgufTensor) -> list[float]:
    """Returns the values of a small tensor of type F32; raises ConfigError."""
    try:
        with tensor.file.open("rb") as content:
            content.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.num_bytes // 4}f", content.read(tensor.num_bytes)))
    except (OSError, struct.error) as error:
        raise ConfigError(f"Cannot read {tensor.name} in {tensor.file}: {error}.") from None
