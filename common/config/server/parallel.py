"""Flags of parallelism: ranks, experts, attention groups, stages, hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...api.errors import ConfigError
from ..cli import flag


@dataclass(frozen=True)
class ParallelArgs:
    tp_size: int = flag(1, names=("--tensor-parallel-size", "--tp"), help="tensor-parallel ranks, one process each")
    pp_size: int = flag(1, names=("--pipeline-parallel-size", "--pp"), help=(
        "pipeline stages, each of --tp-size ranks and a share of the layers; chunks of prompts follow one another "
        "through them"))
    pp_max_micro_batch_size: int | None = flag(None, help=(
        "most requests of one step through the stages; by default --max-running-requests / --pp-size"))
    pp_layer_partition: tuple[int, ...] = flag((), help="layers of each stage; by default as even as possible")
    ep_size: int = flag(1, names=("--expert-parallel-size", "--ep"), help=(
        "parts that the experts of a mixture are spread over: with 1 every rank holds a slice of each expert, with "
        "--tp-size whole ones"))
    moe_a2a_backend: Literal["none", "alltoall", "low_latency", "peer"] = flag("none", help=(
        "how tokens reach experts on other ranks. none: every rank computes its experts for all tokens, then an "
        "all-reduce. alltoall: all-to-all dispatch and combine. low_latency: as none, but decode steps of attention "
        "groups of one rank exchange rows through peer memory, fused with the norms. peer: decode steps as "
        "low_latency, and in prefill steps kernels write each token once into the memory of its experts' ranks"))
    enable_eplb: bool = flag(False, help=(
        "count the tokens of every expert, and move experts between ranks to balance them"))
    ep_num_redundant_experts: int = flag(0, help=(
        "physical experts beyond one for each, over all ranks: replicas, with --enable-eplb of the busiest experts"))
    eplb_rebalance_num_iterations: int = flag(1000, help="steps between two rebalancings of --enable-eplb")
    expert_distribution_recorder_mode: Literal["stat"] | None = flag(None, help=(
        "stat counts the tokens of every expert, for /start_expert_distribution_record"))
    dist_backend: Literal["nccl", "gloo"] = flag("nccl", help=(
        "how ranks on GPUs exchange tensors: gloo goes through host memory, without CUDA graphs, where NCCL fails, "
        "and lets ranks share GPUs; for trying out a layout"))

    def __post_init__(self) -> None:
        self._check_stages()
        if self.ep_size < 1 or self.tp_size % self.ep_size:
            raise ConfigError(f"--ep-size {self.ep_size} must be 1 or more and divide --tp-size {self.tp_size}.")
        if self.moe_a2a_backend in ("alltoall", "peer") and self.ep_size != self.tp_size:
            raise ConfigError(f"--moe-a2a-backend {self.moe_a2a_backend} needs whole experts on every rank: set "
                              f"--ep-size to {self.tp_size}.")
        if self.ep_num_redundant_experts < 0:
            raise ConfigError(f"--ep-num-redundant-experts must be 0 or more, not {self.ep_num_redundant_experts}.")
        if (self.enable_eplb or self.ep_num_redundant_experts) and not 1 < self.ep_size == self.tp_size:
            raise ConfigError("--enable-eplb and --ep-num-redundant-experts need several ranks with whole experts: set "
                              "--tp-size and --ep-size to the same number of 2 or more.")
        if self.eplb_rebalance_num_iterations < 1:
            raise ConfigError("--eplb-rebalance-num-iterations must be 1 or more, not "
                              f"{self.eplb_rebalance_num_iterations}.")
        if self.eplb_rebalance_num_iterations != 1000 and not self.enable_eplb:
            raise ConfigError("--eplb-rebalance-num-iterations is for --enable-eplb: give both.")

    @property
    def world_size(self) -> int:
        """Ranks of the server."""
        return self.pp_size * self.tp_size

    def _check_stages(self) -> None:
        if self.pp_size < 1:
            raise ConfigError(f"--pp-size must be 1 or more, not {self.pp_size}.")
        if self.pp_size == 1 and (self.pp_max_micro_batch_size is not None or self.pp_layer_partition):
            raise ConfigError("--pp-max-micro-batch-size and --pp-layer-partition need a --pp-size above 1.")
        if self.pp_max_micro_batch_size is not None and self.pp_max_micro_batch_size < 1:
            raise ConfigError(f"--pp-max-micro-batch-size must be 1 or more, not {self.pp_max_micro_batch_size}.")
        if self.pp_layer_partition and (len(self.pp_layer_partition) != self.pp_size
                                        or min(self.pp_layer_partition) < 1):
            raise ConfigError(f"--pp-layer-partition must name 1 or more layers for each of the {self.pp_size} stages "
                              "of --pp-size.")
        if self.pp_size > 1 and (self.enable_eplb or self.ep_num_redundant_experts
                                 or self.expert_distribution_recorder_mode is not None):
            raise ConfigError("--enable-eplb, --ep-num-redundant-experts and --expert-distribution-recorder-mode "
                              "need the experts of all layers in each rank: leave them out with --pp-size.")


@dataclass(frozen=True)
class DataParallelArgs:
    """Flags of attention groups, and of the balancing between them."""

    enable_dp_attention: bool = flag(False, help=(
        "make attention groups of --tp-size / --dp-size ranks with requests, a KV pool and a schedule of their own, "
        "and compute MLPs and experts together; --max-running-requests, --chunked-prefill-size and the like are then "
        "per group"))
    dp_size: int = flag(1, names=("--data-parallel-size", "--dp"), help=(
        "attention groups of --enable-dp-attention; it divides --tp-size, which counts all ranks"))
    enable_dp_lm_head: bool = flag(False, help=(
        "every attention group holds the whole output head, instead of gathering the rows to score"))
    enable_two_batch_overlap: bool = flag(False, help=(
        "compute a prefill step in two micro-batches: the rows of one travel between attention groups while the GPU "
        "computes the other"))
    two_batch_min_tokens: int = flag(16384, help=(
        "tokens in an attention group's step from which --enable-two-batch-overlap splits it: the host needs twice "
        "as long to launch micro-batches"))
    load_balance_method: Literal["round_robin", "shortest_queue", "minimum_tokens"] = flag("round_robin", help=(
        "which attention group takes a request that names no data_parallel_rank; a prefill server chooses by the "
        "bootstrap room"))

    def __post_init__(self) -> None:
        if self.dp_size < 1:
            raise ConfigError(f"--dp-size must be 1 or more, not {self.dp_size}.")
        if self.two_batch_min_tokens < 4:
            raise ConfigError(f"--two-batch-min-tokens must be 4 or more, not {self.two_batch_min_tokens}.")


@dataclass(frozen=True)
class NodeArgs:
    """The hosts that a server's ranks are spread over, in equal shares."""

    nnodes: int = flag(1, help=(
        "hosts that share the ranks of --tp-size and --pp-size; each runs the same command with its --node-rank"))
    node_rank: int = flag(0, help="this host's number; HTTP is served by host 0 alone")
    dist_init_addr: str | None = flag(None, names=("--nccl-init-addr",), help=(
        "HOST:PORT of host 0, where the ranks of all hosts connect; the next port is used too"))

    def __post_init__(self) -> None:
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} must be 0 or more and below --nnodes {self.nnodes}.")
        if (self.nnodes > 1) != (self.dist_init_addr is not None):
            raise ConfigError("--nnodes above 1 and --dist-init-addr HOST:PORT go together.")
        if self.dist_init_addr is not None:
            host, _, port = self.dist_init_addr.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65535:
                raise ConfigError(f"--dist-init-addr must be HOST:PORT, not {self.dist_init_addr}.")

    @property
    def first_host(self) -> str | None:
        """Host 0's address; None where there is one host."""
        return None if self.dist_init_addr is None else self.dist_init_addr.rpartition(":")[0].strip("[]")

    @property
    def link_address(self) -> tuple[str, int]:
        """The address at which host 0 listens for the others."""
        assert self.dist_init_addr is not None and self.first_host is not None
        return self.first_host, int(self.dist_init_addr.rpartition(":")[2]) + 1
