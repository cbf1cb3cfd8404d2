"""Triton, or stand-ins that let the kernel files be imported where it is not installed.

``runs_triton(tensor)`` says whether a launcher runs its kernel or the plain-torch twin: a kernel on a GPU, and on
a CPU only under Triton's interpreter (``TRITON_INTERPRET=1`` before the import).

Programmatic dependent launch (PDL, GPUs from sm_90 on) lets a kernel start before the previous one in its stream has
ended, so that its start-up, and what it may read early, cost nothing. A kernel uses it like this::

    def _kernel(..., PDL: tl.constexpr):
        start_next(PDL)        # the next kernel may start once every program of this one is here, or has ended
        ...                    # early reads: see below
        wait_for_last(PDL)     # the previous kernel has ended, and its writes are visible

    _kernel[grid](..., **pdl(x))

- ``wait_for_last`` ends when the directly previous kernel has ended. All earlier kernels have ended too, but only
  because each of them waits as well: *in a kernel that is launched with ``pdl`` every program waits before it returns*,
  even if it reads nothing that is written. (A program without work need not wait if another one always does.)
- Before the wait nothing is written, and nothing is read that a kernel may still be writing: nothing of the step, for a
  chain of kernels that all start the next one at once runs ahead by many. That leaves weights, and what was written
  before the last launch without ``pdl`` in this stream: such a kernel starts when all earlier ones have ended.
  Data that changes from step to step is then read with ``cache_modifier=".cg"``: the L1 cache may hold the old values.
- After the wait all is as without PDL. A buffer that the allocator (or a CUDA graph's pool) hands out again after a
  kernel has read it is overwritten by a later kernel after its wait, when the reader has ended.
- A previous kernel that does not start the next one (cuBLAS's, torch's) is waited for as usual, and so is one launched
  with ``pdl`` when the next one is not. CUDA graphs keep such launches (as programmatic edges).
- A kernel whose programs wait for each other, or for a peer's, needs all of them resident: launch it without ``pdl``.
- A profiler counts a kernel's time from its early start on: set ``PDL_ALLOWED`` to False before anything is captured.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from .device import is_hopper

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    # 3.9 warns that 3.10 will fuse multiplications with additions no more unless asked to: kernels are measured fused.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    try:
        import triton
        import triton.language as tl
    except ImportError:
        class tl:
            @staticmethod
            def constexpr(value):
                return value

        class triton:
            @staticmethod
            def jit(function=None, **options):
                return function or (lambda kernel: kernel)

AVAILABLE = hasattr(triton, "__version__")
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_triton(tensor: torch.Tensor) -> bool:
    return INTERPRETED or (AVAILABLE and tensor.is_cuda)


GLUON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton with which every kernel written in Gluon compiles for a Hopper GPU (_gluon.py)."""


def compiles_gluon(version: str) -> bool:
    """Compares a version of Triton with ``GLUON_VERSIONS``."""
    return ".".join(version.split(".")[:2]) in GLUON_VERSIONS


LOADS_PASS_STORES = AVAILABLE and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
"""True if the compiler pipelines the loads of a loop that also stores. From Triton 3.9 on it does not, and gives no
warning: such a loop then waits for memory in every iteration."""


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Says whether the kernels written in Gluon run on a device; all of them are for Hopper GPUs. Gluon is young:
    another Triton may use other names, and then the plain Triton kernels run (the log says so at start)."""
    return AVAILABLE and compiles_gluon(triton.__version__) and is_hopper(device)


PDL_ALLOWED = True


def pdl(tensor: torch.Tensor) -> dict[str, bool]:
    """Options to add to the launch of a kernel with ``PDL: tl.constexpr`` on the GPU of ``tensor``: see above."""
    if PDL_ALLOWED and not INTERPRETED and tensor.is_cuda and _has_pdl(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(tl.extra.cuda, "gdc_wait")


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next kernel start when all programs of this one have arrived here or ended. It orders no memory."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Waits until the previous kernel has ended and all its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def _mend_interpreter() -> None:
    """Repairs two faults of Triton 3.6's interpreter. It turns a scalar, stored as an array of one element, into a loop
    bound with ``int()``, which NumPy 2.4 refuses for arrays with dimensions: every kernel with a loop would raise
    TypeError. Its casts to float8 lose the carry of a mantissa that is rounded up, which halves the value."""
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
