"""Interfaces of attention backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ...kernels.arguments import HeadNorms
from ...kernels.attention.rope_and_store import rope_and_store
from ..api.errors import ConfigError
from ..config.scores import Scores
from ..forward.forward_batch import ForwardBatch
from ..forward.step_context import AttentionPlan
from ..kvcache.pool import KVPool
from .workspace import AttentionWorkspace

ANY_LENGTH = 1 << 30
"""``plan``'s ``max_length`` for last-token rows: splits are merged whether or not requests have several, so that a
server's warm-up compiles the merge."""


class AttentionPlanner(Protocol):
    """The part of a backend's interface that is the same for all kinds of attention: it plans batches. A backend keeps
    nothing of a batch."""

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> AttentionPlan:
        """Plans ``batch``, a decode step or a ragged extend over existing prefixes, in ``workspace``.

        With ``max_length`` the step is captured into a graph, whose replays find other page tables in the batch's
        tensors, of sequences up to ``max_length`` tokens. Only backends that can decode under capture take it. It is
        called twice: before the run that warms up, and before the one that is captured.

        ``run`` may write its results to ``out`` [T, heads * values].
        """

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        """Compiles the kernels of prompts: calls ``compute_prompt``, which plans and computes a prompt of one row by
        this backend, once for each of them."""

    def verifies(self, batch: ForwardBatch) -> bool:
        """Says whether the backend has kernels for ``batch``, a step that verifies drafts, or that has a mask."""

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, *inputs: Any) -> torch.Tensor:
        """Runs the last layer, whose ``inputs`` are those of the plan's ``run``: stores keys and values of all rows of
        ``batch``; only those of its ``last_tokens`` attend. A backend has it if its plans' ``attends_last_tokens``."""

    @property
    def attends_last_tokens(self) -> bool:
        """True if the backend has ``run_last_tokens``."""


class AttentionBackend(AttentionPlanner, Protocol):
    """Causal self-attention over the paged KV cache: ``plan`` once a batch, the plan's ``run`` once a layer. A backend
    has one sliding window: a query sees at most that many tokens up to its own (None: all). A batch's ``mask`` says
    which of the newest slots a row sees; they all are in its window.

    ``run(layer, q, k, v, cos_sin=None, norms=None, sinks=None)`` stores this step's keys and values in the pool, then
    attends; it returns ``[T, Hq, D]``. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D]; ``cos_sin`` [positions, R]
    float32, when given, is the rotary table of the rope that is applied to the first R values of ``q`` (in place) and
    ``k``, after ``norms`` of their heads. ``sinks`` [Hq] float32 are logits that join the denominators of the heads'
    softmaxes. It mutates the pool and ``q``.
    """


@runtime_checkable
class CompilesKernels(Protocol):
    """A backend whose kernels of prompts take long to compile at a machine's first start."""

    def compile_meanwhile(self) -> None:
        """Compiles them in the background, where they are not yet; prompts are another kernel's until then. Without
        this call the first prompt waits."""


class AttentionFacts(NamedTuple):
    """Facts about a rank by which a backend is chosen: ``dtype`` is the model's, ``head_dim`` a head's values, and
    ``softcap`` what its scores are capped by (0: they are not)."""

    device: torch.device
    dtype: str
    head_dim: int
    softcap: float = 0.0


class AttentionFactory(Protocol):
    """A registered backend. Its file imports the library that it ``needs`` when it is made, not before."""

    captures: bool
    """True if decode steps run under CUDA graphs."""

    def check(self, facts: AttentionFacts) -> None:
        """Raises ConfigError where the backend cannot run."""

    def make(self, pool: KVPool, num_heads: int, dtype: torch.dtype, window: int | None,
             scores: Scores) -> AttentionBackend:
        """Makes the backend of layers with this ``window`` and these ``scores``; ``num_heads`` counts this rank's query
        heads, ``dtype`` is the model's."""


def check_gpu(name: str, device: torch.device) -> None:
    """Raises ConfigError where there is no GPU, for backends that need one."""
    if device.type != "cuda":
        raise ConfigError(f"--attention-backend {name} needs a GPU: use torch on a CPU.")


def gather(stored: torch.Tensor, index: Any, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Gathers ``stored[index]`` in ``dtype``; float8 values are multiplied by ``scale``, and gathered as bytes, as not
    every device indexes float8."""
    if stored.itemsize > 1:
        return stored[index].to(dtype)
    return stored.view(torch.uint8)[index].view(stored.dtype).to(dtype) * scale


def store(pool: KVPool, batch: ForwardBatch, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          cos_sin: torch.Tensor | None, norms: HeadNorms | None,
          inputs_ready: bool = False, rope_keys_in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rope and store a layer's keys and values, the part of ``run`` that all backends share; returns the layer's
    key and value pages. ``inputs_ready`` and ``rope_keys_in_place`` are as in ``rope_and_store``."""
    k_pages, v_pages = pool.layer(layer)
    k_scale, v_scale = pool.layout.scales_of(layer)
    rope_and_store(q, k, v, k_pages, v_pages, batch.page_of_token, batch.offset_in_page, cos_sin,
                   batch.positions, k_scale, v_scale, norms, inputs_ready, rope_keys_in_place)
    return k_pages, v_pages
