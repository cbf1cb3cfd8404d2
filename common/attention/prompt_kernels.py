"""FlashInfer's kernels of prompts, compiled while a server answers by its own.

They are compiled once a machine and choice of types, which takes all of its cores a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

log = logging.getLogger(__name__)

_NICENESS = 10
"""Compilers leave the cores to processes that serve."""


class PromptKernels:
    """``ready`` once the kernels are loaded; until then prompts are another kernel's. ``load`` compiles them where that
    was not done before, and loads them; ``compiled`` says that it will not wait.

    Where compilation fails they are never ready, which one warning says."""

    def __init__(self, load: Callable[[], object], compiled: bool):
        self.ready = compiled
        self._load = load
        if not compiled:
            log.info("Prompts are computed by Triton's kernels until FlashInfer's are compiled, once on this machine.")
            threading.Thread(target=self._compile, name="flashinfer-compiler", daemon=True).start()

    def _compile(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        began = time.monotonic()
        try:
            self._load()
        except (RuntimeError, OSError) as error:
            log.warning("FlashInfer's kernels cannot be compiled, and prompts stay with Triton's: %s",
                        str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__)
            return
        self.ready = True
        log.info("FlashInfer's kernels compute prompts from now on; they took %.0f s to compile.",
                 time.monotonic() - began)


def flashinfer_prompts(fa3: bool, types: Mapping[str, torch.dtype], head_dim: int, *, window: bool,
                       softcap: bool) -> PromptKernels:
    """Names the kernels that FlashInfer's wrappers will ask for: of queries and keys in ``types``, in one or several
    pages, with page tables of int32."""
    from flashinfer.jit import gen_batch_prefill_module
    from flashinfer.prefill import get_batch_prefill_module

    queries = types["q_data_type"]
    kernels: tuple[Any, ...] = ("fa3" if fa3 else "fa2", queries, types["kv_data_type"], queries, torch.int32, head_dim,
                                head_dim, 0, window, softcap, False)
    spec = gen_batch_prefill_module(*kernels)
    return PromptKernels(lambda: get_batch_prefill_module(*kernels), spec.is_aot or spec.is_compiled)
