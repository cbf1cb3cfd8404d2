"""Products by that algorithm of cuBLASLt which the caller names: torch takes the first that the library proposes.

cuBLASLt is called through ctypes, in the copy that torch has loaded; structures, attributes and their numbers are those
of CUDA's ``cublasLt.h``, equal in CUDA 12 and 13. What a product needs is made once, a ``Plan``; a call is then one of
the library's on the current stream, with a workspace from torch's allocator, and may be captured.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as c_pointer
from dataclasses import dataclass, fields

import torch

_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSES_FIRST, _PLAIN_SECOND = 3, 4  # of a product's description; an operand is plain (0) or transposed (1)
_ONE, _ZERO = c_float(1.0), c_float(0.0)


@dataclass(frozen=True)
class Algorithm:
    """``cublasLtMatmulAlgoConfigAttributes_t``: all but ``id`` are what the library lets one choose of an algorithm.
    ``tile``, ``stages`` and ``cluster`` are numbers of its lists of such; ``splits`` is of the inner dimension."""

    id: int
    tile: int
    splits: int = 1
    reduction: int = 0
    swizzle: int = 0
    custom: int = 0
    stages: int = 0
    inner: int = 0
    cluster: int = 0


_SIZES = (c_int32, c_uint32, c_int32, c_uint32, c_uint32, c_uint32, c_uint32, c_uint16, c_uint16)
"""Of the attributes, which are numbered as ``Algorithm`` has them."""


class _Algorithm(Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Checked(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]


class Library:
    """cuBLASLt with a handle of the current device. Raises OSError where there is none."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "none").split(".")[0]
        self._functions = ctypes.CDLL(f"libcublasLt.so.{major}")
        version = self._functions.cublasLtGetVersion
        version.restype = c_size_t
        self.release = version() // 10000, version() % 10000 // 100
        """Its major and minor number."""
        self.handle = c_pointer()
        if self("Create", byref(self.handle)):
            raise OSError("cuBLASLt does not start here")

    def __call__(self, name: str, *values: object) -> int:
        """The status of a function, 0 of one that has succeeded."""
        return getattr(self._functions, "cublasLt" + name)(*values)

    def expect(self, name: str, *values: object) -> None:
        status = self(name, *values)
        assert status == 0, f"cublasLt{name} returns {status}"


@functools.cache
def library(device: int) -> Library | None:
    """Of the GPU with this index; None where there is no such library."""
    with torch.cuda.device(device):
        try:
            return Library()
        except OSError:
            return None


class Plan:
    """``rows`` x ``out`` sums over ``width`` in ``dtype``; neighbouring rows of the first factor are ``stride`` values
    apart. Raises NotImplementedError where the library does not have the algorithm for that."""

    def __init__(self, library: Library, rows: int, out: int, width: int, stride: int, dtype: torch.dtype,
                 algorithm: Algorithm):
        self._library, self.rows, self.out = library, rows, out
        number = _TYPES[dtype]
        self._product = c_pointer()
        library.expect("MatmulDescCreate", byref(self._product), c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        for attribute, value in ((_TRANSPOSES_FIRST, c_int32(1)), (_PLAIN_SECOND, c_int32(0))):
            library.expect("MatmulDescSetAttribute", self._product, c_int(attribute), byref(value), c_size_t(4))
        # The library's matrices are stored by columns: the weight is transposed, and rows are columns.
        self._weight = self._layout(number, width, out, width)
        self._x = self._layout(number, width, rows, stride)
        self._y = self._layout(number, out, rows, out)
        self._algorithm = _Algorithm()
        checked = _Checked()
        types = [c_int(kind) for kind in (_COMPUTE_FLOAT32, _FLOAT32, number, number, number, number)]
        if (library("MatmulAlgoInit", library.handle, *types, c_int(algorithm.id), byref(self._algorithm))
                or not self._configured(algorithm)
                or library("MatmulAlgoCheck", library.handle, self._product, self._weight, self._x, self._y, self._y,
                           byref(self._algorithm), byref(checked)) or checked.state):
            raise NotImplementedError(f"{algorithm} of {rows} x {out} x {width}")
        self._workspace = checked.workspace

    def _layout(self, dtype: int, rows: int, columns: int, stride: int) -> c_pointer:
        made = c_pointer()
        self._library.expect("MatrixLayoutCreate", byref(made), c_int(dtype), c_uint64(rows), c_uint64(columns),
                             c_int64(stride))
        return made

    def _configured(self, algorithm: Algorithm) -> bool:
        for number, (field, size) in enumerate(zip(fields(algorithm), _SIZES)):
            value = size(getattr(algorithm, field.name))
            if number and self._library("MatmulAlgoConfigSetAttribute", byref(self._algorithm), c_int(number),
                                        byref(value), c_size_t(ctypes.sizeof(value))):
                return False
        return True

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x`` [rows, width] ``@ weight`` [out, width] ``.T``: ``[rows, out]``. The weight is contiguous, ``x`` in its
        rows; both begin at multiples of 16 bytes."""
        y = torch.empty((self.rows, self.out), dtype=x.dtype, device=x.device)
        # Of the current stream's memory: in a graph it is the graph's own.
        space = torch.empty(self._workspace, dtype=torch.uint8, device=x.device) if self._workspace else None
        self._library.expect(
            "Matmul", self._library.handle, self._product, byref(_ONE), c_pointer(weight.data_ptr()), self._weight,
            c_pointer(x.data_ptr()), self._x, byref(_ZERO), c_pointer(y.data_ptr()), self._y, c_pointer(y.data_ptr()),
            self._y, byref(self._algorithm), c_pointer(space.data_ptr() if space is not None else None),
            c_size_t(self._workspace), c_pointer(torch.cuda.current_stream(x.device).cuda_stream))
        return y
