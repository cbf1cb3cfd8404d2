"""Objects of a KV storage: a page's name, its header, and what shows that it is whole and ours.

An object is a header of 512 bytes, the body (page_shape.py), and zeros up to a multiple of 4 KiB, which direct I/O
needs. Its name is ``{page key}_{digest}_L{first layer}-{end}_H{first head}-{end}`` and says nothing of the server that
wrote it. The header repeats all of it, so that an object under a wrong name is not used, and has the body's checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..page_keys import PageKey
from .page_shape import PageShape, Rectangle

FORMAT_VERSION = 1
"""Of header and body; part of the digest, so that releases with another one do not find each other's objects."""
HEADER_BYTES = 512
ALIGNMENT = 4096
NAME_PATTERN = "[0-9a-f]{64}_[0-9a-f]{32}_L[0-9]+-[0-9]+_H[0-9]+-[0-9]+"

Verdict = Literal["ok", "corrupt", "foreign", "unchecked"]

_MAGIC = b"BATON KV"
_FIELDS = struct.Struct("<8sHHI16s32s4IQQ")
"""Magic, version, checksum's kind, number of pools, digest, key, layers, heads, bytes of the body, its checksum."""
_CRC = struct.Struct("<I")
_CRC32, _XXH3 = 1, 2


def _checksums() -> dict[int, Callable[[Any], int]]:
    """The checksums by their kind, the fastest last: CRC-32 has 1.7 GB/s on a core, XXH3 13 GB/s."""
    found: dict[int, Callable[[Any], int]] = {_CRC32: zlib.crc32}
    try:
        import xxhash
    except ImportError:  # it comes with the engine's install; an image without it can still read and write
        return found
    return {**found, _XXH3: xxhash.xxh3_64_intdigest}


class ObjectFormat:
    """Names, writes and checks the objects of one model and page layout, ``digest`` (fingerprint.py, 32 hex digits)."""

    def __init__(self, digest: str, shape: PageShape):
        self.digest, self.shape = digest, shape
        self._checksums = _checksums()
        self._digest = bytes.fromhex(digest)

    def __repr__(self) -> str:
        return f"ObjectFormat({self.digest}, {self.shape.own})"

    def name(self, key: PageKey, rectangle: Rectangle) -> str:
        layers, heads = self.shape.layers, self.shape.heads(rectangle)
        return f"{key.hex()}_{self.digest}_L{layers.start}-{layers.stop}_H{heads.start}-{heads.stop}"

    def num_bytes(self, rectangle: Rectangle) -> int:
        """Bytes of a whole object."""
        return -(-(HEADER_BYTES + self.shape.body_bytes(rectangle)) // ALIGNMENT) * ALIGNMENT

    def body(self, data: np.ndarray, rectangle: Rectangle) -> np.ndarray:
        """The body within an object ``data`` (uint8)."""
        return data[HEADER_BYTES:HEADER_BYTES + self.shape.body_bytes(rectangle)]

    def seal(self, key: PageKey, data: np.ndarray) -> None:
        """Writes the header of this rank's object, whose body is in ``data`` (uint8), and the zeros after it."""
        own = self.shape.own
        body = self.body(data, own)
        data[HEADER_BYTES + len(body):] = 0
        kind, checksum = next(reversed(self._checksums.items()))
        facts = self._facts(key, own, kind, checksum(body))
        data[:HEADER_BYTES] = np.frombuffer(facts + _CRC.pack(zlib.crc32(facts)), np.uint8)

    def check(self, key: PageKey, rectangle: Rectangle, data: np.ndarray) -> Verdict:
        """Tells whether ``data`` (uint8) is the whole object of this key: ``foreign`` where it is one of another
        model, layout or release, ``corrupt`` where bytes differ from those that were written, ``unchecked`` where its
        checksum cannot be computed here."""
        header = data[:HEADER_BYTES].tobytes()
        facts = header[:-_CRC.size]
        magic, _, kind, *_, checksum = _FIELDS.unpack_from(facts)
        if magic != _MAGIC or _CRC.unpack(header[-_CRC.size:])[0] != zlib.crc32(facts):
            return "corrupt"
        if facts != self._facts(key, rectangle, kind, checksum):
            return "foreign"
        if kind not in self._checksums:
            return "unchecked"
        return "ok" if self._checksums[kind](self.body(data, rectangle)) == checksum else "corrupt"

    def _facts(self, key: PageKey, rectangle: Rectangle, kind: int, checksum: int) -> bytes:
        """The header without its own checksum."""
        layers, heads, pools = self.shape.layers, self.shape.heads(rectangle), self.shape.pool_bytes(rectangle)
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, kind, len(pools), self._digest, key, layers.start, layers.stop,
                              heads.start, heads.stop, sum(pools), checksum)
        return (fields + struct.pack(f"<{len(pools)}Q", *pools)).ljust(HEADER_BYTES - _CRC.size, b"\0")
