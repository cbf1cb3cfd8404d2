"""Triton, or stand-ins that let the kernel files be imported where it is not installed.

``runs_triton(tensor)`` says whether a launcher runs its kernel or the plain-torch twin: a kernel on a GPU, and on
a CPU only under Triton's interpreter (``TRITON_INTERPRET=1`` before the import).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        class tl:
            constexpr = int

        class triton:
            @staticmethod
            def jit(function=None, **options):
                return function or (lambda kernel: kernel)

AVAILABLE = hasattr(triton, "__version__")
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_triton(tensor: torch.Tensor) -> bool:
    return INTERPRETED or (AVAILABLE and tensor.is_cuda)


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter turns a scalar, kept as an array of one element, into a loop bound with ``int()``,
    which NumPy 2.4 refuses for arrays with dimensions: every kernel with a loop would raise TypeError. Its casts to
    float8 lose the carry of a mantissa that is rounded up, which halves the value."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    convert = interpreter._convert_float
    float8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in float8 or source not in (tl.float32, tl.float16):
            return convert(data, source, target, rounding)
        return torch.tensor(data).to(float8[target]).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


if INTERPRETED:
    _mend_interpreter()
