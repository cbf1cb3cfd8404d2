"""Configuration of one server (unified, prefill or decode), composed from one dataclass for each concern.

Flag names are SGLang's where the meaning is the same. A flag lives in the class of its concern, and so do the rules on
what it does not combine with, those with flags of other classes too.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ...api.errors import ConfigError
from ..logs import LogArgs
from ..roles import Role
from ..rules import check_rules
from .answers import AnswerArgs, ChatArgs, GrammarArgs
from .cache import CacheArgs
from .debug import DebugArgs
from .disaggregation import DisaggregationArgs, EventsArgs
from .http import HttpArgs
from .kernels import KernelArgs
from .model import ModelArgs
from .observe import ObserveArgs
from .offload import OffloadArgs
from .parallel import DataParallelArgs, NodeArgs, ParallelArgs
from .responses import ResponsesArgs
from .schedule import ScheduleArgs
from .sparsity import SparsityArgs
from .speculative import SpeculativeArgs
from .storage import StorageArgs
from .tiers import TierArgs
from .tls import TlsArgs

__all__ = [
    "AnswerArgs", "CacheArgs", "ChatArgs", "DataParallelArgs", "DebugArgs", "DisaggregationArgs", "EventsArgs",
    "GrammarArgs", "HttpArgs", "KernelArgs", "LogArgs", "ModelArgs", "NodeArgs", "ObserveArgs", "OffloadArgs",
    "ParallelArgs", "ResponsesArgs", "ScheduleArgs", "ServerConfig", "ServerSections", "SparsityArgs",
    "SpeculativeArgs", "StorageArgs", "TierArgs", "TlsArgs",
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
    responses: ResponsesArgs = ResponsesArgs()
    answers: AnswerArgs = AnswerArgs()
    data_parallel: DataParallelArgs = DataParallelArgs()
    nodes: NodeArgs = NodeArgs()
    speculative: SpeculativeArgs = SpeculativeArgs()
    logs: LogArgs = LogArgs()
    offload: OffloadArgs = OffloadArgs()
    tiers: TierArgs = TierArgs()
    debug: DebugArgs = DebugArgs()
    sparsity: SparsityArgs = SparsityArgs()
    tls: TlsArgs = TlsArgs()


@dataclass(frozen=True)
class ServerConfig(ServerSections):
    """Configuration of one server. Construction raises ConfigError where flags of different sections do not fit."""

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def captures_graphs(self) -> bool:
        """False if all kernels are launched one by one."""
        return (not self.kernels.disable_cuda_graph and self.debug.debug_tensor_dump_output_folder is None
                and self.debug.forward_hooks is None
                and self.parallel.expert_distribution_recorder_mode != "per_token")

    @property
    def largest_captured(self) -> int:
        """The largest decode batch that runs as a CUDA graph."""
        return min(self.kernels.cuda_graph_max_bs, self.schedule.max_running_requests)

    def captured_prompts(self, context_length: int) -> int:
        """Returns the largest prefill step, in tokens of an attention group, that runs as CUDA graphs; 0: none does."""
        kernels = self.kernels
        if not self.captures_graphs or kernels.disable_piecewise_cuda_graph or self.parallel.pp_size > 1:
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

    @property
    def duties(self) -> Role:
        """See DisaggregationArgs: what the server is built for, which a request's own role may not be."""
        return self.disaggregation.duties

    def require_mode(self, mode: str) -> ServerConfig:
        """Returns itself, for a command that starts servers of one mode; raises ConfigError for another mode."""
        if self.mode != mode:
            raise ConfigError(f"launch_{mode} starts {mode} servers; for --disaggregation-mode {self.mode} there is "
                              "launch_server.")
        return self

    @property
    def shown_url(self) -> str:
        """The name of this server in its peers' logs."""
        http = self.http
        host = socket.gethostname() if http.host in ("0.0.0.0", "::", "") else http.host
        return f"{self.tls.scheme}://{f'[{host}]' if ':' in host else host}:{http.port}"

    @property
    def model_name(self) -> str:
        return self.model.served_model_name or self.model.model_path
