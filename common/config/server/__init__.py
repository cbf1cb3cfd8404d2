"""Configuration of one server (unified, prefill or decode), composed from one dataclass for each concern.

Flag names are SGLang's where the meaning is the same. A flag lives in the class of its concern; rules that span two
classes are checked by ServerConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...api.errors import ConfigError
from ..logs import LogArgs
from ..roles import FOR_DECODING, Role
from .answers import AnswerArgs, ChatArgs, GrammarArgs
from .cache import CacheArgs
from .disaggregation import DisaggregationArgs, EventsArgs
from .http import HttpArgs
from .kernels import KernelArgs
from .model import ModelArgs
from .observe import ObserveArgs
from .parallel import DataParallelArgs, NodeArgs, ParallelArgs
from .schedule import ScheduleArgs
from .storage import StorageArgs

__all__ = [
    "AnswerArgs", "CacheArgs", "ChatArgs", "DataParallelArgs", "DisaggregationArgs", "EventsArgs", "GrammarArgs",
    "HttpArgs", "KernelArgs", "LogArgs", "ModelArgs", "NodeArgs", "ObserveArgs", "ParallelArgs", "ScheduleArgs",
    "ServerConfig", "ServerSections", "StorageArgs",
]


@dataclass(frozen=True)
class ServerSections:
    """All flags of a server, one section for each concern. Each section checks its own flags alone."""

    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    parallel: ParallelArgs = ParallelArgs()
    kernels: KernelArgs = KernelArgs()
    disaggregation: DisaggregationArgs = DisaggregationArgs()
    http: HttpArgs = HttpArgs()
    events: EventsArgs = EventsArgs()
    chat: ChatArgs = ChatArgs()
    observe: ObserveArgs = ObserveArgs()
    grammar: GrammarArgs = GrammarArgs()
    storage: StorageArgs = StorageArgs()
    answers: AnswerArgs = AnswerArgs()
    data_parallel: DataParallelArgs = DataParallelArgs()
    nodes: NodeArgs = NodeArgs()
    logs: LogArgs = LogArgs()


def default_of(section: Any, name: str) -> Any:
    """The default of a section's flag."""
    return type(section).__dataclass_fields__[name].default


@dataclass(frozen=True)
class ServerConfig(ServerSections):
    """Configuration of one server. Construction raises ConfigError where flags of different sections do not fit."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_mode()
        self._check_ranks()
        if self.parallel.pp_size > 1:
            self._check_pipeline()
        self._check_data_parallel()

    def _check_ranges(self) -> None:
        positive = {
            "--page-size": self.cache.page_size, "--tp-size": self.parallel.tp_size,
            "--stream-interval": self.http.stream_interval, "--max-payload-size": self.http.max_payload_size,
            "--batch-concurrency": self.storage.batch_concurrency, "--context-length": self.model.context_length,
            "--num-layer-groups": self.cache.num_layer_groups,
            "--cuda-graph-bs": min(self.kernels.cuda_graph_bs, default=None),
            "--piecewise-cuda-graph-tokens": min(self.kernels.piecewise_cuda_graph_tokens, default=None),
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}.")
        if not -(2**63) <= self.model.random_seed < 2**63:
            raise ConfigError(f"--random-seed must fit into 64 bits, {self.model.random_seed} does not.")
        if self.model.base_gpu_id < 0:
            raise ConfigError(f"--base-gpu-id must be 0 or more, not {self.model.base_gpu_id}.")
        if not 0 <= self.events.kv_events_port < 65535:
            raise ConfigError(f"--kv-events-port must be between 0 and 65534, not {self.events.kv_events_port}.")
        if not 0 < self.cache.mem_fraction_static < 1:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, not {self.cache.mem_fraction_static}.")

    def _check_mode(self) -> None:
        """Checks flags that some roles of a server do not have."""
        for path, reason in self.role.unused.items():
            section, _, name = path.partition(".")
            given = getattr(self, section)
            if getattr(given, name) != default_of(given, name):
                raise ConfigError(f"--{name.replace('_', '-')} {reason}")
        if self.schedule.schedule_policy in ("lpm", "dfs-weight") and self.cache.disable_radix_cache:
            raise ConfigError(f"--schedule-policy {self.schedule.schedule_policy} needs the prefix cache; drop "
                              "--disable-radix-cache, or choose another policy.")
        if self.model.is_embedding:
            given = {"--enable-mixed-chunk": self.schedule.enable_mixed_chunk,
                     "--retract-host-memory-gb": self.schedule.retract_host_memory_gb}
            for name in filter(given.get, given):
                raise ConfigError(f"{name} {FOR_DECODING}")

    def _check_ranks(self) -> None:
        """Checks the number of data-parallel ranks and of hosts against the number of all ranks."""
        groups = self.data_parallel
        if groups.dp_size > 1 and not groups.enable_dp_attention:
            raise ConfigError(f"--dp-size {groups.dp_size} needs --enable-dp-attention; for whole replicas start "
                              "several servers behind the router (launch_cluster --dp-size does).")
        if groups.dp_size == 1 and (groups.enable_dp_attention or groups.enable_dp_lm_head):
            raise ConfigError("--enable-dp-attention and --enable-dp-lm-head need a --dp-size above 1.")
        if groups.enable_two_batch_overlap and groups.dp_size == 1:
            raise ConfigError("--enable-two-batch-overlap overlaps the exchange of attention groups: it needs "
                              "--enable-dp-attention and a --dp-size above 1.")
        if self.parallel.tp_size % groups.dp_size:
            raise ConfigError(f"--dp-size {groups.dp_size} must divide --tp-size {self.parallel.tp_size}, "
                              "which counts all ranks of the server.")
        if self.parallel.world_size % self.nodes.nnodes:
            stages = f" times --pp-size {self.parallel.pp_size}" if self.parallel.pp_size > 1 else ""
            raise ConfigError(f"--nnodes {self.nodes.nnodes} must divide --tp-size {self.parallel.tp_size}{stages}, "
                              "which counts the ranks of all hosts.")

    def _check_data_parallel(self) -> None:
        """Checks flags that depend on attention groups."""
        backend, groups = self.parallel.moe_a2a_backend, self.data_parallel
        if backend in ("low_latency", "peer") and not 1 < self.dp_size == self.parallel.tp_size:
            raise ConfigError(f"--moe-a2a-backend {backend} is for several ranks that each have tokens of their own: "
                              "set --enable-dp-attention, and --dp-size and --tp-size to the same number of 2 or more.")
        if backend == "peer" and groups.enable_two_batch_overlap:
            raise ConfigError("--enable-two-batch-overlap does not work with --moe-a2a-backend peer: leave one of them "
                              "out.")
        two, chunk = groups.two_batch_min_tokens, self.schedule.chunked_prefill_size
        if groups.enable_two_batch_overlap and 0 < min(chunk, self.schedule.max_prefill_tokens) < two:
            raise ConfigError(f"--enable-two-batch-overlap splits steps of --two-batch-min-tokens {two} or more, and "
                              "no step has as many: raise --chunked-prefill-size and --max-prefill-tokens to that.")
        if groups.dp_size > 1 and self.events.kv_events_port:
            raise ConfigError("--kv-events-port publishes one prefix cache, and every attention group of "
                              "--enable-dp-attention has its own: leave it out.")

    def _check_pipeline(self) -> None:
        """Checks flags that do not work with pipeline stages."""
        given = {
            "--enable-dp-attention": self.data_parallel.enable_dp_attention,
            "--is-embedding": self.model.is_embedding,
            "--enable-return-hidden-states": self.answers.enable_return_hidden_states,
            "--enable-mixed-chunk": self.schedule.enable_mixed_chunk,
            "--retract-host-memory-gb": self.schedule.retract_host_memory_gb > 0,
        }
        for name in filter(given.get, given):
            raise ConfigError(f"{name} does not work across the stages of --pp-size: leave one of them out.")

    @property
    def largest_captured(self) -> int:
        """The largest decode batch that runs as a CUDA graph."""
        return min(self.kernels.cuda_graph_max_bs, self.schedule.max_running_requests)

    def captured_prompts(self, context_length: int) -> int:
        """Returns the largest prefill step, in tokens of an attention group, that runs as CUDA graphs; 0: none does."""
        kernels = self.kernels
        if kernels.disable_cuda_graph or kernels.disable_piecewise_cuda_graph or self.parallel.pp_size > 1:
            return 0
        return min(max(kernels.piecewise_cuda_graph_tokens, default=kernels.piecewise_cuda_graph_max_tokens),
                   self.schedule.largest_prefill(context_length))

    @property
    def dp_size(self) -> int:
        return self.data_parallel.dp_size

    @property
    def mode(self) -> str:
        return self.disaggregation.disaggregation_mode

    @property
    def role(self) -> Role:
        return self.disaggregation.role

    def require_mode(self, mode: str) -> ServerConfig:
        """Returns itself, for a command that starts servers of one mode; raises ConfigError for another mode."""
        if self.mode != mode:
            raise ConfigError(f"launch_{mode} starts {mode} servers; for --disaggregation-mode {self.mode} there is "
                              "launch_server.")
        return self

    @property
    def model_name(self) -> str:
        return self.model.served_model_name or self.model.model_path
