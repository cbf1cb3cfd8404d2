"""Which part of a layer's experts one rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from ..api.errors import ConfigError
from ..config.moe import MoESpec
from ..config.server import ParallelArgs
from .all_to_all import AllToAllExchange
from .live_rows import LiveRows
from .low_latency import LowLatencyExchange
from .tp import TPGroup

AllToAll = Literal["none", "alltoall", "low_latency", "peer"]


@dataclass(frozen=True)
class ExpertShare:
    """One rank's share. The ranks of ``group`` stand in ``ep_size`` rows of neighbours: a row holds an equal part of
    the experts, and each rank of a row an equal part of every such expert's intermediate values.

    ``a2a`` says how tokens reach the experts of other ranks: ``none`` computes every token on every rank that holds
    one of its experts, and adds the results up; ``alltoall`` sends each token to the ranks of its experts and back;
    ``low_latency`` is ``none`` but for decode steps, which go by ``meeting``; ``peer`` has these and is ``alltoall``
    in others, which go by ``sent`` where they can. ``padded``: of prompts' steps.
    ``apart``: every rank is an attention group of its own, with its own tokens.

    With ``movable`` experts change their ranks while they serve (then each is whole on its ranks), and ``redundant``
    places hold further replicas. ``counted``: layers count the tokens of every expert.
    """

    group: TPGroup
    ep_size: int = 1
    a2a: AllToAll = "none"
    apart: bool = False
    meeting: LowLatencyExchange | None = None
    sent: AllToAllExchange | None = None
    redundant: int = 0
    movable: bool = False
    counted: bool = False
    padded: LiveRows = field(default_factory=LiveRows)

    @staticmethod
    def of(args: ParallelArgs, group: TPGroup) -> ExpertShare:
        """What the flags ask for."""
        return ExpertShare(group, args.ep_size, args.moe_a2a_backend, redundant=args.ep_num_redundant_experts,
                           movable=args.enable_eplb or args.ep_num_redundant_experts > 0,
                           counted=args.enable_eplb or args.expert_distribution_recorder_mode is not None)

    @property
    def own_tokens(self) -> bool:
        """Whether a rank gives its layers its own tokens, in place of all tokens that there are."""
        return self.apart and self.spreads

    @property
    def spreads(self) -> bool:
        """Whether tokens go to the ranks of their experts alone, but for those that all meet."""
        return self.a2a in ("alltoall", "peer")

    @property
    def live(self) -> torch.Tensor | None:
        """Rows of the step that are tokens; None: all."""
        if self.meeting is not None and self.meeting.live is not None:
            return self.meeting.live
        return self.padded.rows

    @property
    def split(self) -> int:
        """Ranks that share each expert's intermediate values."""
        return self.group.size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.group.rank // self.split

    @property
    def split_rank(self) -> int:
        return self.group.rank % self.split

    def places(self, spec: MoESpec) -> int:
        """Experts that a rank holds."""
        return (spec.num_experts + self.redundant) // self.ep_size

    def check(self, spec: MoESpec | None) -> None:
        """Raises ConfigError where the experts (None: the model has none) cannot be shared so."""
        ep = self.ep_size
        assert self.group.size % ep == 0
        assert ep == self.group.size or (not self.spreads and not self.movable and not self.redundant)
        if spec is None:
            if ep > 1 or self.a2a != "none" or self.movable or self.counted:
                raise ConfigError("--ep-size, --moe-a2a-backend, --enable-eplb and --expert-distribution-recorder-mode "
                                  "are for mixtures of experts, which this model is not: leave them out.")
            return
        if spec.num_experts % ep:
            raise ConfigError(f"--ep-size {ep} must divide the model's {spec.num_experts} experts.")
        if (spec.num_experts + self.redundant) % ep or self.places(spec) > spec.num_experts:
            raise ConfigError(f"--ep-num-redundant-experts {self.redundant} must be a multiple of --ep-size {ep}, and "
                              f"leave each rank at most the model's {spec.num_experts} experts once.")
        if spec.intermediate_size % self.split:
            raise ConfigError(f"{self.split} ranks cannot share an expert's intermediate size {spec.intermediate_size} "
                              f"evenly: raise --ep-size, or change --tp-size.")
