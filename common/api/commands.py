"""Commands that change an engine as a whole: its cache, weights, memory, limits, and whether it is profiled.

Every rank of a group executes the same commands in the same iteration of its loop.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryKind = Literal["weights", "kv_cache"]
Activity = Literal["CPU", "GPU"]


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Drop the prefix cache. Refused while requests run."""


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Load another checkpoint of the same architecture, from a local folder or the hub, and drop the prefix cache.

    Refused while requests run. The checkpoint is checked before the first weight is changed: one that does not fit
    changes nothing.
    """

    model_path: str
    revision: str | None = None


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """Free the device memory of weights (copied to host memory) or of the KV pool (discarded). Refused while requests
    run; requests are refused until ``ResumeMemory``."""

    kinds: tuple[MemoryKind, ...]


class ResumeMemory(msgspec.Struct, frozen=True, tag=True):
    """Allocate released memory again."""

    kinds: tuple[MemoryKind, ...]


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Record torch.profiler's trace into ``folder``, one file a rank, until ``StopProfile`` or for ``num_steps``."""

    folder: str
    num_steps: int | None = None
    activities: tuple[Activity, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Write the trace."""


class SetLimits(msgspec.Struct, frozen=True, tag=True):
    """Change the scheduler's limits; None leaves a limit as it is. No limit may exceed its value at startup, because
    memory was sized by that."""

    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    schedule_policy: str | None = None


PauseMode = Literal["abort", "retract", "in_place"]


class PauseGeneration(msgspec.Struct, frozen=True, tag=True):
    """Launch no step until ``ContinueGeneration``. With ``retract`` running requests are retracted: they are recomputed
    later, with the weights of that time. With ``in_place`` they keep their pages; with ``abort`` the sender of this
    command aborts them too."""

    mode: PauseMode = "abort"


class ContinueGeneration(msgspec.Struct, frozen=True, tag=True):
    """Continue after ``PauseGeneration``."""


class RecordExperts(msgspec.Struct, frozen=True, tag=True):
    """Record the number of tokens that every expert computes, from ``start`` to ``stop``; ``dump`` writes the current,
    or last, record into ``folder``. Refused where the engine does not count them."""

    action: Literal["start", "stop", "dump"]
    folder: str = ""


Command = (FlushCache | UpdateWeights | ReleaseMemory | ResumeMemory | StartProfile | StopProfile | SetLimits
           | RecordExperts | PauseGeneration | ContinueGeneration)
