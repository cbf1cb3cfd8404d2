"""Expert parallelism: the part of a layer's experts that one rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..api.errors import ConfigError
from ..config.moe import MoESpec
from ..config.server import ParallelArgs
from .all_to_all import AllToAllExchange
from .low_latency import LowLatencyExchange
from .tp import TPGroup

AllToAll = Literal["none", "alltoall", "low_latency", "peer"]
Dispatch = Literal["dynamic", "static", "fake"]


@dataclass(frozen=True)
class ExpertParallel:
    """One rank's part. The ranks of ``group`` form ``ep_size`` expert groups of neighbouring ranks: an expert group has
    an equal part of the experts, and each of its ranks an equal part of every such expert's intermediate values.

    ``a2a`` says how tokens reach the experts of other ranks:

    - ``none``: every token is computed on every rank that has one of its experts, and the results are summed;
    - ``alltoall``: each token is sent to the ranks of its experts, and its results back;
    - ``low_latency``: as ``none``, but decode steps use ``low_latency``;
    - ``peer``: as ``alltoall``, but decode steps use ``low_latency``, and others ``all_to_all`` where they can.

    ``attn_tp_is_one``: every rank is an attention group of its own, with its own tokens.

    With ``eplb`` experts move between ranks while they serve (each is then whole on its ranks), and ``redundant``
    further physical experts hold replicas. ``counts_tokens``: layers count the tokens of every expert.
    ``whole_dense``: every rank has the whole MLPs of the layers without experts, for its own tokens. ``dispatch`` is
    --ep-dispatch-algorithm. With ``num_nodes`` above 1 the neighbouring ranks of a host get whole groups of experts.
    """

    group: TPGroup
    ep_size: int = 1
    a2a: AllToAll = "none"
    attn_tp_is_one: bool = False
    low_latency: LowLatencyExchange | None = None
    all_to_all: AllToAllExchange | None = None
    redundant: int = 0
    eplb: bool = False
    counts_tokens: bool = False
    whole_dense: bool = False
    dispatch: Dispatch = "dynamic"
    num_nodes: int = 1

    @staticmethod
    def from_args(args: ParallelArgs, group: TPGroup, nnodes: int = 1, *,
                  keeps_chosen: bool = False) -> ExpertParallel:
        """Creates the part that the flags describe, of ranks on ``nnodes`` hosts. ``keeps_chosen``: requests may ask
        for the experts of their tokens."""
        return ExpertParallel(group, args.ep_size, args.moe_a2a_backend, redundant=args.ep_num_redundant_experts,
                           eplb=args.enable_eplb or args.ep_num_redundant_experts > 0,
                           counts_tokens=(args.enable_eplb or args.expert_distribution_recorder_mode is not None
                                          or args.enable_expert_distribution_metrics or keeps_chosen),
                           whole_dense=args.moe_dense_tp_size is not None, dispatch=args.ep_dispatch_algorithm,
                           num_nodes=nnodes if args.eplb_algorithm.endswith("hierarchical") else 1)

    @property
    def dispatches_tokens(self) -> bool:
        """True if MoE layers take a rank's own tokens and dispatch them, instead of taking the tokens of all ranks."""
        return self.attn_tp_is_one and self.uses_all_to_all

    @property
    def uses_all_to_all(self) -> bool:
        """True if tokens are sent to the ranks of their experts only, except in low-latency decode steps."""
        return self.a2a in ("alltoall", "peer")

    @property
    def expert_tp_size(self) -> int:
        """The number of ranks that split each expert's intermediate values."""
        return self.group.size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.group.rank // self.expert_tp_size

    @property
    def expert_tp_rank(self) -> int:
        return self.group.rank % self.expert_tp_size

    def num_local_experts(self, spec: MoESpec) -> int:
        """The number of physical experts of a rank."""
        return (spec.num_experts + self.redundant) // self.ep_size

    def check(self, spec: MoESpec | None) -> None:
        """Raises ConfigError where the experts (None: the model has none) cannot be split this way."""
        ep = self.ep_size
        assert self.group.size % ep == 0
        assert ep == self.group.size or (not self.uses_all_to_all and not self.eplb and not self.redundant)
        if spec is None:
            if (ep > 1 or self.a2a != "none" or self.eplb or self.counts_tokens or self.whole_dense
                    or self.dispatch != "dynamic"):
                raise ConfigError("--ep-size, --moe-a2a-backend, --enable-eplb, --ep-dispatch-algorithm, "
                                  "--expert-distribution-recorder-mode and --moe-dense-tp-size are for mixtures of "
                                  "experts, which this model is not: leave them out.")
            return
        if spec.num_experts % ep:
            raise ConfigError(f"--ep-size {ep} must divide the model's {spec.num_experts} experts.")
        if (spec.num_experts + self.redundant) % ep or self.num_local_experts(spec) > spec.num_experts:
            raise ConfigError(f"--ep-num-redundant-experts {self.redundant} must be a multiple of --ep-size {ep}, and "
                              f"leave each rank at most the model's {spec.num_experts} experts once.")
        if self.num_nodes > 1 and (spec.num_groups % self.num_nodes or self.redundant % self.num_nodes):
            raise ConfigError(f"--eplb-algorithm deepseek_hierarchical and deepseek_vec_hierarchical need groups of "
                              f"experts (the model has {spec.num_groups}) and --ep-num-redundant-experts that --nnodes "
                              f"{self.num_nodes} divides: use deepseek or deepseek_vec.")
        if spec.intermediate_size % self.expert_tp_size:
            raise ConfigError(f"{self.expert_tp_size} ranks cannot share an expert's intermediate size "
                              f"{spec.intermediate_size} "
                              f"evenly: raise --ep-size, or change --tp-size.")
