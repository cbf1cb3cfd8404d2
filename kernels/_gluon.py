"""Names of Gluon's functions in the installed Triton.

Gluon is young. Triton 3.7 renamed ``thread_barrier``, 3.9 made ``_reinterpret`` public and removed the old names of
asynchronous copies. ``_triton.GLUON_VERSIONS`` are the versions with which every kernel compiles for a Hopper GPU.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language.core import builtin

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits until all threads of a group have arrived, and see what the others wrote."""
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@builtin
def reinterpret(buffer: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Views shared memory as another type, shape and layout."""
    view = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)
