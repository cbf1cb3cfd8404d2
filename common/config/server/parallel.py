"""Flags of parallelism: ranks, experts, attention groups, stages, hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules

EplbAlgorithm = Literal["auto", "deepseek", "deepseek_vec", "deepseek_hierarchical", "deepseek_vec_hierarchical"]


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
    moe_dense_tp_size: Literal[1] | None = flag(None, help=(
        "1: every rank has the whole MLPs of a mixture's layers without experts, and computes its own attention "
        "group's rows with them, instead of a slice for the rows of all groups"))
    enable_eplb: bool = flag(False, help=(
        "count the tokens of every expert, and move experts between ranks to balance them"))
    ep_num_redundant_experts: int = flag(0, help=(
        "physical experts beyond one for each, over all ranks: replicas, with --enable-eplb of the busiest experts"))
    eplb_algorithm: EplbAlgorithm = flag("auto", help=(
        "how --enable-eplb places experts. deepseek: replicas of the busiest, packed evenly over all ranks. "
        "deepseek_vec: replicas of those that are the busiest of single steps, by the tokens of each step; for loads "
        "that change from step to step. _hierarchical: groups of experts over --nnodes first, then each host's over "
        "its ranks. auto is deepseek"))
    eplb_rebalance_num_iterations: int = flag(1000, help="steps between two rebalancings of --enable-eplb")
    eplb_rebalance_layers_per_chunk: int | None = flag(None, help=(
        "layers whose experts --enable-eplb moves before one step; by default all, which steps wait for"))
    eplb_min_rebalancing_utilization_threshold: float = flag(1.0, help=(
        "experts stay where ranks have this share of the busiest rank's tokens to do, or more, in the mean"))
    init_expert_location: str = flag("trivial", help=(
        "placement of experts at start: a file that /dump_expert_distribution_record wrote, a .pt or .json file of "
        "SGLang's, or JSON: logical_count, by which experts are placed, or physical_to_logical_map; trivial: in order"))
    ep_dispatch_algorithm: Literal["dynamic", "static", "fake"] = flag("dynamic", help=(
        "which replica of an expert computes a token. dynamic: all in turn. static: always the same one for the tokens "
        "of a rank, its own where it has one; by all-to-all. fake: experts in turn instead of those that the router "
        "chooses, for measurements: answers are wrong"))
    expert_distribution_recorder_mode: Literal["stat", "per_pass", "per_token"] | None = flag(None, help=(
        "what /start_expert_distribution_record records. stat: the tokens of every expert. per_pass: those of every "
        "step apart, by physical experts. per_token: the experts of every token, with its id and position; kernels "
        "are launched one by one, and each step waits for its record"))
    expert_distribution_recorder_buffer_size: int = flag(-1, help=(
        "the last steps that a record of experts has, and that --eplb-algorithm deepseek_vec places experts by; -1 for "
        "all since its start, or --eplb-rebalance-num-iterations"))
    enable_expert_distribution_metrics: bool = flag(False, help=(
        "count the tokens of every expert, and export how evenly ranks are used"))
    numa_node: tuple[int, ...] = flag((), some=True, help=(
        "NUMA node for each GPU of this host (on a CPU for each rank), whose CPUs and memory its rank uses; -1: all. "
        "By default a rank is bound to the node of its GPU, as the system states it"))
    dist_timeout: int = flag(600, help="seconds that a rank waits for others, at start and in an exchange of tensors")
    dist_backend: Literal["nccl", "gloo"] = flag("nccl", help=(
        "how ranks on GPUs exchange tensors: gloo goes through host memory, without CUDA graphs, where NCCL fails, "
        "and lets ranks share GPUs; for trying out a layout"))

    own_flag_rules: ClassVar[tuple[Rule[ParallelArgs], ...]] = (
        Rule(lambda c: c.pp_size == 1 and (c.pp_max_micro_batch_size is not None or c.pp_layer_partition),
             "--pp-max-micro-batch-size and --pp-layer-partition need a --pp-size above 1."),
        Rule(lambda c: c.pp_layer_partition and (len(c.pp_layer_partition) != c.pp_size
                                                 or min(c.pp_layer_partition) < 1),
             "--pp-layer-partition must name 1 or more layers for each of the {pp_size} stages of --pp-size."),
        Rule(lambda c: c.pp_size > 1 and (c.enable_eplb or c.ep_num_redundant_experts
                                          or c.expert_distribution_recorder_mode is not None),
             "--enable-eplb, --ep-num-redundant-experts and --expert-distribution-recorder-mode need the experts of "
             "all layers in each rank: leave them out with --pp-size."),
        Rule(lambda c: c.ep_size < 1 or c.tp_size % c.ep_size,
             "--ep-size {ep_size} must be 1 or more and divide --tp-size {tp_size}."),
        Rule(lambda c: c.moe_a2a_backend in ("alltoall", "peer") and c.ep_size != c.tp_size,
             "--moe-a2a-backend {moe_a2a_backend} needs whole experts on every rank: set --ep-size to {tp_size}."),
        Rule(lambda c: (c.enable_eplb or c.ep_num_redundant_experts) and not 1 < c.ep_size == c.tp_size,
             "--enable-eplb and --ep-num-redundant-experts need several ranks with whole experts: set --tp-size and "
             "--ep-size to the same number of 2 or more."),
        Rule(lambda c: c.eplb_rebalance_num_iterations != 1000 and not c.enable_eplb,
             "--eplb-rebalance-num-iterations is for --enable-eplb: give both."),
        Rule(lambda c: not c.enable_eplb and (c.eplb_rebalance_layers_per_chunk is not None
                                              or c.eplb_min_rebalancing_utilization_threshold != 1.0),
             "--eplb-rebalance-layers-per-chunk and --eplb-min-rebalancing-utilization-threshold are for "
             "--enable-eplb: give it too."),
        Rule(lambda c: c.eplb_algorithm != "auto" and not c.enable_eplb and c.init_expert_location == "trivial",
             "--eplb-algorithm {eplb_algorithm} is for --enable-eplb and --init-expert-location: give one of them."),
        Rule(lambda c: c.init_expert_location != "trivial" and not (c.enable_eplb or c.ep_num_redundant_experts),
             "--init-expert-location needs experts that have a place of their own: set --enable-eplb or "
             "--ep-num-redundant-experts."),
        Rule(lambda c: not 0 < c.eplb_min_rebalancing_utilization_threshold <= 1,
             "--eplb-min-rebalancing-utilization-threshold must be above 0 and at most 1."),
        Rule(lambda c: c.ep_dispatch_algorithm == "static" and (
            c.moe_a2a_backend not in ("alltoall", "peer") or not (c.enable_eplb or c.ep_num_redundant_experts)),
             "--ep-dispatch-algorithm static is for tokens that are sent to replicas: set --moe-a2a-backend alltoall "
             "or peer, and --enable-eplb or --ep-num-redundant-experts."),
        Rule(lambda c: c.expert_distribution_recorder_buffer_size < 1
             and c.expert_distribution_recorder_buffer_size != -1,
             "--expert-distribution-recorder-buffer-size must be 1 or more, or -1."),
        Rule(lambda c: c.expert_distribution_recorder_buffer_size != -1 and not (
            c.enable_eplb or c.expert_distribution_recorder_mode is not None),
             "--expert-distribution-recorder-buffer-size is for --expert-distribution-recorder-mode: give both."),
        Rule(lambda c: c.expert_distribution_recorder_mode == "per_token"
             and c.moe_a2a_backend in ("alltoall", "peer"),
             "--expert-distribution-recorder-mode per_token records ranks that choose the experts of all tokens: leave "
             "--moe-a2a-backend {moe_a2a_backend} out, or use per_pass."),
        Rule(lambda c: c.enable_expert_distribution_metrics and (c.ep_size == 1 or c.pp_size > 1),
             "--enable-expert-distribution-metrics compares ranks with experts of their own: set --ep-size to 2 or "
             "more, without --pp-size."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.parallel.expert_distribution_recorder_mode == "per_token" and c.dp_size > 1,
             "--expert-distribution-recorder-mode per_token records the tokens of one attention group: leave "
             "--enable-dp-attention out, or use per_pass."),
        Rule(lambda c: c.parallel.pp_size > 1 and not c.role.computes_prompts,
             "--pp-size is for prefill and unified servers: decode steps are too short for a pipeline; use --tp-size "
             "on decode servers."),
        Rule(lambda c: c.parallel.moe_a2a_backend in ("low_latency", "peer")
             and not 1 < c.dp_size == c.parallel.tp_size,
             "--moe-a2a-backend {parallel.moe_a2a_backend} is for several ranks that each have tokens of their own: "
             "set --enable-dp-attention, and --dp-size and --tp-size to the same number of 2 or more."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "tp_size", "pp_size", "pp_max_micro_batch_size", "eplb_rebalance_num_iterations",
                 "eplb_rebalance_layers_per_chunk", "dist_timeout")
        at_least(self, 0, "ep_num_redundant_experts")
        if min(self.numa_node, default=-1) < -1:
            raise ConfigError(f"--numa-node takes numbers of nodes, or -1, not {min(self.numa_node)}.")
        check_own_rules(self)

    @property
    def balances_steps(self) -> bool:
        """True if experts are placed by the tokens of each step, not of an interval as a whole."""
        return self.enable_eplb and self.eplb_algorithm.startswith("deepseek_vec")

    @property
    def eplb_steps(self) -> int:
        """The last steps by which ``balances_steps`` places experts."""
        size, interval = self.expert_distribution_recorder_buffer_size, self.eplb_rebalance_num_iterations
        return interval if size < 0 else min(size, interval)

    @property
    def world_size(self) -> int:
        """Ranks of the server."""
        return self.pp_size * self.tp_size

    @property
    def without_stages(self) -> ParallelArgs:
        """The flags of a pair's decode server."""
        return replace(self, pp_size=1, pp_max_micro_batch_size=None, pp_layer_partition=())


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

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.dp_size > 1 and not c.data_parallel.enable_dp_attention,
             "--dp-size {data_parallel.dp_size} needs --enable-dp-attention; for whole replicas start several servers "
             "behind the router (launch_cluster --dp-size does)."),
        Rule(lambda c: c.dp_size == 1 and (c.data_parallel.enable_dp_attention or c.data_parallel.enable_dp_lm_head),
             "--enable-dp-attention and --enable-dp-lm-head need a --dp-size above 1: as large as --tp-size for an "
             "attention group on each rank."),
        Rule(lambda c: c.parallel.tp_size % c.dp_size,
             "--dp-size {data_parallel.dp_size} must divide --tp-size {parallel.tp_size}, which counts all ranks of "
             "the server."),
        Rule(lambda c: c.data_parallel.enable_dp_attention and c.parallel.pp_size > 1,
             "--enable-dp-attention does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.data_parallel.enable_two_batch_overlap and c.dp_size == 1,
             "--enable-two-batch-overlap overlaps the exchange of attention groups: it needs --enable-dp-attention and "
             "a --dp-size above 1."),
        Rule(lambda c: c.data_parallel.enable_two_batch_overlap and c.parallel.moe_dense_tp_size is not None,
             "--enable-two-batch-overlap overlaps the exchange of every layer: leave --moe-dense-tp-size out."),
        Rule(lambda c: c.data_parallel.enable_two_batch_overlap and c.parallel.moe_a2a_backend == "peer",
             "--enable-two-batch-overlap does not work with --moe-a2a-backend peer: leave one of them out."),
        Rule(lambda c: c.data_parallel.enable_two_batch_overlap
             and 0 < min(c.schedule.chunked_prefill_size, c.schedule.max_prefill_tokens)
             < c.data_parallel.two_batch_min_tokens,
             "--enable-two-batch-overlap splits steps of --two-batch-min-tokens {data_parallel.two_batch_min_tokens} "
             "or more, and no step has as many: raise --chunked-prefill-size and --max-prefill-tokens to that."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "dp_size")
        at_least(self, 4, "two_batch_min_tokens")


@dataclass(frozen=True)
class NodeArgs:
    """The hosts that a server's ranks are spread over, in equal shares."""

    nnodes: int = flag(1, help=(
        "hosts that share the ranks of --tp-size and --pp-size; each runs the same command with its --node-rank"))
    node_rank: int = flag(0, help="this host's number; HTTP is served by host 0 alone")
    dist_init_addr: str | None = flag(None, names=("--nccl-init-addr",), help=(
        "HOST:PORT of host 0, where all ranks connect; with several hosts the next port is used too (default: a socket "
        "of the one host)"))

    own_flag_rules: ClassVar[tuple[Rule[NodeArgs], ...]] = (
        Rule(lambda c: c.nnodes < 1 or not 0 <= c.node_rank < c.nnodes,
             "--node-rank {node_rank} must be 0 or more and below --nnodes {nnodes}."),
        Rule(lambda c: c.nnodes > 1 and c.dist_init_addr is None,
             "--nnodes {nnodes} needs the address where the hosts meet: set --dist-init-addr HOST:PORT, on host 0."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.parallel.pp_size == 1 and c.parallel.tp_size % c.nodes.nnodes,
             "--nnodes {nodes.nnodes} must divide --tp-size {parallel.tp_size}, which counts the ranks of all hosts."),
        Rule(lambda c: c.parallel.pp_size > 1 and c.parallel.world_size % c.nodes.nnodes,
             "--nnodes {nodes.nnodes} must divide --tp-size {parallel.tp_size} times --pp-size {parallel.pp_size}, "
             "which counts the ranks of all hosts."),
    )

    def __post_init__(self) -> None:
        check_own_rules(self)
        if self.dist_init_addr is not None:
            host, _, port = self.dist_init_addr.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65535:
                raise ConfigError(f"--dist-init-addr must be HOST:PORT, not {self.dist_init_addr}.")

    @property
    def first_host(self) -> str | None:
        """Host 0's address; None where there is one host."""
        return self._init_address[0] if self.nnodes > 1 else None

    @property
    def link_address(self) -> tuple[str, int]:
        """The address at which host 0 listens for the others."""
        host, port = self._init_address
        return host, port + 1

    @property
    def listen_addresses(self) -> list[tuple[str, int]]:
        """Addresses at which host 0 listens for ranks and hosts."""
        if self.dist_init_addr is None:
            return []
        return [self._init_address, *([self.link_address] if self.nnodes > 1 else [])]

    @property
    def _init_address(self) -> tuple[str, int]:
        assert self.dist_init_addr is not None
        host, _, port = self.dist_init_addr.rpartition(":")
        return host.strip("[]"), int(port)
