"""Configuration of one server (unified, prefill or decode), composed from one dataclass a concern.

Flag names are SGLang's where the thing is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..api.errors import ConfigError
from ..openai.reasoning import REASONING
from ..openai.tool_calls import FORMATS
from .cli import flag

Mode = Literal["null", "prefill", "decode"]


@dataclass(frozen=True)
class ModelArgs:
    model_path: str = flag(required=True, names=("--model",), help=(
        "local checkpoint folder, Hugging Face hub id, or 'tinychat' for the chat model that ships with Baton"))
    tokenizer_path: str | None = flag(None, help="tokenizer folder or hub id, when it is not the model's")
    revision: str | None = flag(None, help="hub revision of the model")
    served_model_name: str | None = flag(None, help="model name in the API; the default is --model-path")
    load_format: Literal["auto", "safetensors", "dummy"] = flag(
        "auto", help="'dummy' fills the weights with random values, for benchmarks without a checkpoint")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", help="type of weights and KV cache; auto is the checkpoint's on a GPU and float32 on a CPU")
    quantization: Literal["fp8", "fp8_per_tensor", "fp8_per_block"] | None = flag(None, help=(
        "weights and activations of linear layers in float8: fp8 scales each output and each token, the others each "
        "projection, or blocks of 128 x 128; checkpoints in float8 need no flag"))
    context_length: int | None = flag(None, help="longest prompt plus output in tokens; the default is the model's")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="where the engine runs; auto prefers a GPU")
    base_gpu_id: int = flag(0, help="index of the first GPU to use; tensor-parallel ranks take the following ones")
    is_embedding: bool = flag(False, help="serve vectors of texts (or a classifier's scores) instead of generating")
    pooling: Literal["auto", "last", "mean"] = flag("auto", help=(
        "what --is-embedding makes a vector of: the last token's hidden state, or the mean of all; auto reads the "
        "checkpoint's 1_Pooling/config.json, and is last without it"))
    random_seed: int = flag(0, help="seed of dummy weights and of unseeded sampling")
    return_original_logprob: bool = flag(False, help=(
        "tell log-probabilities of the output as they are before temperature (penalties and bias count in both cases)"))
    chat_template: str | None = flag(None, help=(
        "jinja file, or the name of a template that ships with Baton, in place of the checkpoint's chat template"))


@dataclass(frozen=True)
class CacheArgs:
    page_size: int = flag(16, help="tokens in a KV page")
    mem_fraction_static: float = flag(0.88, help="share of GPU memory for weights and KV pool together")
    max_total_tokens: int | None = flag(None, help="KV pool size in tokens; the default is what memory allows")
    disable_radix_cache: bool = flag(False, help="do not keep finished requests' pages for later prompts")
    num_layer_groups: int | None = flag(None, help=(
        "layer groups of the KV pool; the default makes a page of one group about 1 MiB"))
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = flag("auto", help=(
        "type of the KV cache; auto is the model's, float8 takes half its memory and its way between servers"))
    quantization_param_path: str | None = flag(None, help=(
        "JSON file with the scales of a KV cache in float8 ({\"kv_cache\": {\"scaling_factor\": {RANK: {LAYER: "
        "FACTOR}}}}); without it they are the checkpoint's, or 1"))

    def __post_init__(self) -> None:
        if self.quantization_param_path is not None and self.kv_cache_dtype == "auto":
            raise ConfigError("--quantization-param-path is for a KV cache in float8: set --kv-cache-dtype too.")


@dataclass(frozen=True)
class ScheduleArgs:
    max_running_requests: int = flag(256, help="requests that decode together at most")
    max_queued_requests: int = flag(4096, help="waiting requests at most; further ones are answered 429")
    chunked_prefill_size: int = flag(8192, help=(
        "prompt tokens that one step computes at most; -1 computes prompts whole"))
    max_prefill_tokens: int = flag(16384, help=(
        "prompt tokens of a step of several prompts: a further prompt joins only within this"))
    disable_overlap_schedule: bool = flag(False, help=(
        "take in each step's results before the next is launched (always so on a CPU)"))
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "random"] = flag("fcfs", help=(
        "order of waiting requests: first come first served, longest cached prefix, subtree of the prefix cache that "
        "most wait for, longest output, or random"))
    schedule_conservativeness: float = flag(1.0, help=(
        "scales how much of the output of running requests is reserved before another one is admitted: larger values "
        "for fewer retractions, 0 for the largest batches"))
    enable_priority_scheduling: bool = flag(False, help=(
        "more urgent requests (the field priority, larger first) run first, and take the places of others"))
    schedule_low_priority_values_first: bool = flag(False, help="smaller values of priority are more urgent")
    priority_scheduling_preemption_threshold: int = flag(10, help=(
        "a waiting request takes the place of running ones that are less urgent by more than this"))
    default_priority_value: int = flag(0, help="priority of requests that name none")
    enable_mixed_chunk: bool = flag(False, help=(
        "decode in every step and compute prompts beside it: smoother streams, without CUDA graphs while prompts "
        "are computed; the decoded tokens count in --chunked-prefill-size"))
    retract_host_memory_gb: float = flag(0.0, help=(
        "host memory of each rank, in GiB, that the KV cache of retracted requests is kept in where that is cheaper "
        "than computing it again (0: always compute)"))
    request_timeout: float = flag(3600.0, help="seconds after which a request that has not ended is failed with 504")

    def __post_init__(self) -> None:
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise ConfigError(f"--chunked-prefill-size must be 1 or more, or -1 for whole prompts, not "
                              f"{self.chunked_prefill_size}.")
        least = {"--max-running-requests": (self.max_running_requests, 1),
                 "--max-prefill-tokens": (self.max_prefill_tokens, 1),
                 "--schedule-conservativeness": (self.schedule_conservativeness, 0),
                 "--priority-scheduling-preemption-threshold": (self.priority_scheduling_preemption_threshold, 0),
                 "--retract-host-memory-gb": (self.retract_host_memory_gb, 0)}
        for name, (value, bound) in least.items():
            if not value >= bound:
                raise ConfigError(f"{name} must be {bound} or more, not {value}.")
        if self.enable_priority_scheduling:
            return
        defaults = ScheduleArgs.__dataclass_fields__
        for field in ("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold",
                      "default_priority_value"):
            if getattr(self, field) != defaults[field].default:
                raise ConfigError(f"--{field.replace('_', '-')} needs --enable-priority-scheduling.")

    @property
    def lowest_priority(self) -> int:
        """What the least urgent request can name."""
        return 2**31 - 1 if self.schedule_low_priority_values_first else -(2**31)

    @property
    def for_prefill(self) -> ScheduleArgs:
        """These of a pair's prefill server: without what is for servers that decode."""
        return replace(self, enable_mixed_chunk=False, retract_host_memory_gb=0.0)

    def largest_prefill(self, context_length: int) -> int:
        """Prompt tokens of one step, at most."""
        if self.chunked_prefill_size > 0:
            return self.chunked_prefill_size
        return max(self.max_prefill_tokens, context_length)


@dataclass(frozen=True)
class ParallelArgs:
    tp_size: int = flag(1, names=("--tensor-parallel-size", "--tp"), help="tensor-parallel ranks, one process each")
    ep_size: int = flag(1, names=("--expert-parallel-size", "--ep"), help=(
        "parts that a mixture's experts are spread over; with 1 every rank holds a slice of each expert, with "
        "--tp-size whole ones"))
    moe_a2a_backend: Literal["none", "alltoall"] = flag("none", help=(
        "how tokens reach the experts of other ranks: none computes each on every rank and adds up, alltoall sends it "
        "to the ranks of its experts and back"))
    enable_eplb: bool = flag(False, help=(
        "count the tokens of every expert, and move experts between ranks so that all have as much to do"))
    ep_num_redundant_experts: int = flag(0, help=(
        "places beyond one an expert, all ranks together, which hold replicas; with --enable-eplb of the busiest"))
    eplb_rebalance_num_iterations: int = flag(1000, help="steps after which --enable-eplb moves experts anew")
    expert_distribution_recorder_mode: Literal["stat"] | None = flag(None, help=(
        "stat counts the tokens of every expert, for /start_expert_distribution_record"))

    def __post_init__(self) -> None:
        if self.ep_size < 1 or self.tp_size % self.ep_size:
            raise ConfigError(f"--ep-size {self.ep_size} must be 1 or more and divide --tp-size {self.tp_size}.")
        if self.moe_a2a_backend != "none" and self.ep_size != self.tp_size:
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


@dataclass(frozen=True)
class DataParallelArgs:
    """Attention groups within one server, and which of them computes a request."""

    enable_dp_attention: bool = flag(False, help=(
        "give every --tp-size / --dp-size ranks requests, a KV pool and a schedule of their own, and compute the "
        "layers behind attention together; --max-running-requests, --chunked-prefill-size and the like are then each "
        "such group's"))
    dp_size: int = flag(1, names=("--data-parallel-size", "--dp"), help=(
        "attention groups of --enable-dp-attention; it divides --tp-size, which counts all ranks"))
    enable_dp_lm_head: bool = flag(False, help=(
        "let every attention group hold the whole output head, instead of gathering what it is to score"))
    load_balance_method: Literal["round_robin", "shortest_queue", "minimum_tokens"] = flag("round_robin", help=(
        "which attention group takes a request that names no data_parallel_rank; a prefill server goes by its room"))

    def __post_init__(self) -> None:
        if self.dp_size < 1:
            raise ConfigError(f"--dp-size must be 1 or more, not {self.dp_size}.")
        if self.dp_size > 1 and not self.enable_dp_attention:
            raise ConfigError(f"--dp-size {self.dp_size} needs --enable-dp-attention; for whole replicas start several "
                              "servers behind the router (launch_cluster --dp-size does).")
        if self.dp_size == 1 and (self.enable_dp_attention or self.enable_dp_lm_head):
            raise ConfigError("--enable-dp-attention and --enable-dp-lm-head need a --dp-size above 1.")


@dataclass(frozen=True)
class NodeArgs:
    """The hosts that a server's ranks are spread over, in equal shares."""

    nnodes: int = flag(1, help=(
        "hosts that share the ranks of --tp-size; each runs the same command with its --node-rank"))
    node_rank: int = flag(0, help="this host's number; HTTP is served by host 0 alone")
    dist_init_addr: str | None = flag(None, names=("--nccl-init-addr",), help=(
        "HOST:PORT of host 0, where the ranks of all hosts meet; the port above it is used too"))

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
        """Where host 0 listens for the others."""
        assert self.dist_init_addr is not None and self.first_host is not None
        return self.first_host, int(self.dist_init_addr.rpartition(":")[2]) + 1


@dataclass(frozen=True)
class KernelArgs:
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = flag("auto", help=(
        "auto is flashinfer on a GPU where installed, else triton; torch on a CPU"))
    decode_attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = flag("auto", help=(
        "backend of decode steps; auto is triton on a GPU, which CUDA graphs need, else --attention-backend"))
    sampling_backend: Literal["auto", "torch", "triton"] = flag("auto", help=(
        "what draws tokens: auto is our kernels, which sort nothing, on a GPU where a trial draws as torch does"))
    disable_cuda_graph: bool = flag(False, help="launch a decode step's kernels one by one")
    disable_custom_all_reduce: bool = flag(False, help=(
        "leave small sums of a host's GPUs to NCCL, too, in place of reading them from each other's memory"))
    cuda_graph_max_bs: int = flag(256, help="largest decode batch that runs as a CUDA graph")
    cuda_graph_bs: tuple[int, ...] = flag((), help="decode batch sizes to capture, instead of a list up to the largest")


@dataclass(frozen=True)
class DisaggregationArgs:
    disaggregation_mode: Mode = flag("null", help="role of this server: both phases in one engine, or one of them")
    disaggregation_transfer_backend: Literal["nixl", "mooncake", "fake"] = flag("nixl", help=(
        "how KV pages travel; 'fake' moves them over the control channel, for tests"))
    disaggregation_ib_device: str | None = flag(None, help=(
        "RDMA devices of the mooncake backend, with commas between them; without it mooncake uses TCP"))
    disaggregation_bootstrap_port: int = flag(8998, help="port of a prefill server's bootstrap server")
    disaggregation_bootstrap_timeout: float = flag(30.0, help=(
        "seconds that one half of a request waits for the other before it fails"))
    kv_transfer_timeout: float = flag(120.0, help="seconds a reserved request may wait for its KV cache")
    peer_timeout: float = flag(3.0, help="seconds of silence after which a prefill or decode peer counts as dead")
    kv_retain_seconds: float = flag(5.0, help=(
        "seconds that a prefill server keeps what it computed of a request whose decode server has not told that it "
        "goes on, so that another attempt costs no forward pass (0: not at all); memory that others need ends it "
        "sooner"))
    kv_checksum: Literal["auto", "sampled", "full", "off"] = flag("auto", help=(
        "how much of each page that arrives a decode server compares with what prefill sent; auto is sampled for "
        "pages in host memory and off on GPUs"))
    cluster_secret: str | None = flag(None, help=(
        "words that prefill and decode servers share: they refuse each other's messages without its seal; better "
        "given in a --config file than on the command line, where other users see it"))

    def __post_init__(self) -> None:
        if self.disaggregation_ib_device is not None and self.disaggregation_transfer_backend != "mooncake":
            raise ConfigError("--disaggregation-ib-device is for --disaggregation-transfer-backend mooncake; NIXL "
                              "takes its devices from the UCX_NET_DEVICES variable of the environment.")
        if self.kv_retain_seconds < 0:
            raise ConfigError(f"--kv-retain-seconds must be 0 or more, not {self.kv_retain_seconds:g}.")
        if self.cluster_secret == "":
            raise ConfigError("--cluster-secret must not be empty; leave the flag out to go without.")


@dataclass(frozen=True)
class HttpArgs:
    host: str = flag("127.0.0.1", help="address to listen on; also the one that peers reach this server's ranks at")
    port: int = flag(30000, help="HTTP port")
    api_key: str | None = flag(None, help="key that clients must send as a bearer token")
    admin_api_key: str | None = flag(None, help=(
        "key that endpoints which change the server ask for in place of --api-key"))
    max_payload_size: int = flag(32 * 1024 * 1024, help=(
        "largest request body in bytes; uploaded files may have 512 MiB"))
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", help="least severe log level that is shown")
    shutdown_grace_secs: float = flag(20.0, help=(
        "seconds that running requests may go on after SIGTERM or SIGINT; a second signal ends the wait"))
    stream_interval: int = flag(1, help="tokens that a stream gathers before it sends an event")


@dataclass(frozen=True)
class AnswerArgs:
    """What answers may be made of and tell; servers that work together need the same."""

    enable_cache_report: bool = flag(True, help="tell in usage how many prompt tokens the prefix cache had")
    enable_custom_logit_processor: bool = flag(False, help=(
        "let requests name a logit processor, MODULE:NAME, that this server imports and runs: whoever may send "
        "requests may then import any module that is installed here"))
    enable_return_hidden_states: bool = flag(False, help="let requests ask for the model's hidden states")


@dataclass(frozen=True)
class EventsArgs:
    kv_events_port: int = flag(0, help=(
        "port on which prefix-cache changes are published for routers (0: none); replays take the port above it"))


@dataclass(frozen=True)
class ChatArgs:
    tool_call_parser: str = flag("auto", help=(
        "how the model writes tool calls: qwen25, llama3, mistral, deepseekv3, gpt-oss, ...; auto goes by its chat "
        "template, none takes answers as they are"))
    reasoning_parser: str | None = flag(None, help=(
        "how the model writes its reasoning, to be told apart from the answer: deepseek-r1, qwen3, gpt-oss, ..."))

    def __post_init__(self) -> None:
        for name, given, known in (("--tool-call-parser", self.tool_call_parser, ("auto", "none", *FORMATS)),
                                   ("--reasoning-parser", self.reasoning_parser, (None, "none", *REASONING))):
            if given not in known:
                raise ConfigError(f"{name} {given} is unknown; it is one of {', '.join(sorted(filter(None, known)))}.")


@dataclass(frozen=True)
class GrammarArgs:
    grammar_backend: Literal["xgrammar", "none"] = flag("xgrammar", help=(
        "what keeps answers to a JSON schema, regular expression or grammar; none refuses such requests"))
    constrained_json_whitespace_pattern: str | None = flag(None, help=(
        "regular expression for the white space between the parts of JSON answers; without it any is allowed"))
    constrained_json_disable_any_whitespace: bool = flag(False, help="no white space between the parts of JSON answers")

    def __post_init__(self) -> None:
        pattern = self.constrained_json_whitespace_pattern
        if pattern is None:
            return
        if self.constrained_json_disable_any_whitespace:
            raise ConfigError("--constrained-json-whitespace-pattern and --constrained-json-disable-any-whitespace "
                              "exclude each other; give one of them.")
        try:
            matched = re.fullmatch(pattern, "") or re.fullmatch(pattern, " ") or re.fullmatch(pattern, "\n")
        except re.error as error:
            raise ConfigError(f"--constrained-json-whitespace-pattern {pattern!r} is no regular expression: "
                              f"{error}.") from None
        if not matched:
            raise ConfigError(f"--constrained-json-whitespace-pattern {pattern!r} matches neither nothing, a space nor "
                              "a newline; it is to match white space.")

    @property
    def whitespace(self) -> str | None:
        """A regular expression for the white space in JSON; None for any."""
        return "" if self.constrained_json_disable_any_whitespace else self.constrained_json_whitespace_pattern


@dataclass(frozen=True)
class StorageArgs:
    file_storage_path: str | None = flag(None, help=(
        "folder for uploaded files and batches, which outlive the server; servers of one host may share it"))
    batch_concurrency: int = flag(16, help=(
        "requests of batches that run together at most; every other request that runs takes one of these places"))


@dataclass(frozen=True)
class ObserveArgs:
    log_requests: bool = flag(False, help="log each request's beginning and end, as JSON")
    log_requests_level: Literal[0, 1, 2, 3] = flag(2, help=(
        "what --log-requests shows: 0 counts, 1 also sampling parameters, 2 also 2,048 ids of the prompt and "
        "characters of the answer, 3 all of them"))
    crash_dump_folder: str | None = flag(None, help=(
        "folder that the requests of the last five minutes are written to when the engine dies"))
    watchdog_timeout: float = flag(300.0, help=(
        "seconds after which a rank whose loop stands still shows its threads' stacks and ends (0: never)"))
    enable_trace: bool = flag(False, help="trace requests to --otlp-traces-endpoint")
    otlp_traces_endpoint: str | None = flag(None, help=(
        "OpenTelemetry collector: HOST:PORT (gRPC) or http://HOST:PORT/v1/traces; turns tracing on (default with "
        "--enable-trace: localhost:4317)"))

    def __post_init__(self) -> None:
        if self.watchdog_timeout < 0:
            raise ConfigError(f"--watchdog-timeout must be 0 or more, not {self.watchdog_timeout}.")

    @property
    def traces_to(self) -> str | None:
        """The collector; None without tracing."""
        return self.otlp_traces_endpoint or ("localhost:4317" if self.enable_trace else None)

    @property
    def log_level_of_requests(self) -> int | None:
        return self.log_requests_level if self.log_requests else None

    @property
    def dump_folder(self) -> Path | None:
        return None if self.crash_dump_folder is None else Path(self.crash_dump_folder).expanduser()


@dataclass(frozen=True)
class ServerConfig:
    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    parallel: ParallelArgs
    kernels: KernelArgs
    disaggregation: DisaggregationArgs
    http: HttpArgs
    events: EventsArgs = EventsArgs()
    chat: ChatArgs = ChatArgs()
    observe: ObserveArgs = ObserveArgs()
    grammar: GrammarArgs = GrammarArgs()
    storage: StorageArgs = StorageArgs()
    answers: AnswerArgs = AnswerArgs()
    data_parallel: DataParallelArgs = DataParallelArgs()
    nodes: NodeArgs = NodeArgs()

    def __post_init__(self) -> None:
        positive = {
            "--page-size": self.cache.page_size, "--tp-size": self.parallel.tp_size,
            "--stream-interval": self.http.stream_interval, "--max-payload-size": self.http.max_payload_size,
            "--batch-concurrency": self.storage.batch_concurrency,
        }
        for name, value in positive.items():
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}.")
        if not 0 <= self.events.kv_events_port < 65535:
            raise ConfigError(f"--kv-events-port must be between 0 and 65534, not {self.events.kv_events_port}.")
        if self.storage.file_storage_path is not None and self.mode == "prefill":
            raise ConfigError("--file-storage-path is for unified and decode servers: a prefill server answers no "
                              "requests by itself, so it cannot run batches.")
        if self.model.is_embedding and self.mode != "null":
            raise ConfigError("--is-embedding has nothing to hand over: leave --disaggregation-mode at null.")
        if self.schedule.schedule_policy in ("lpm", "dfs-weight") and self.cache.disable_radix_cache:
            raise ConfigError(f"--schedule-policy {self.schedule.schedule_policy} goes by the prefix cache; drop "
                              "--disable-radix-cache, or choose another policy.")
        if self.mode == "prefill" or self.model.is_embedding:
            given = {"--enable-mixed-chunk": self.schedule.enable_mixed_chunk,
                     "--retract-host-memory-gb": self.schedule.retract_host_memory_gb}
            for name in filter(given.get, given):
                raise ConfigError(f"{name} is for servers that decode; leave it out here.")
        if self.parallel.tp_size % self.data_parallel.dp_size:
            raise ConfigError(f"--dp-size {self.data_parallel.dp_size} must divide --tp-size {self.parallel.tp_size}, "
                              "which counts all ranks of the server.")
        if self.parallel.tp_size % self.nodes.nnodes:
            raise ConfigError(f"--nnodes {self.nodes.nnodes} must divide --tp-size {self.parallel.tp_size}, which "
                              "counts the ranks of all hosts.")
        if self.data_parallel.dp_size > 1 and self.events.kv_events_port:
            raise ConfigError("--kv-events-port tells of one prefix cache, and every attention group of "
                              "--enable-dp-attention has its own: leave it out.")
        if not 0 < self.cache.mem_fraction_static < 1:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, not {self.cache.mem_fraction_static}.")

    @property
    def dp_size(self) -> int:
        return self.data_parallel.dp_size

    @property
    def mode(self) -> Mode:
        return self.disaggregation.disaggregation_mode

    @property
    def model_name(self) -> str:
        return self.model.served_model_name or self.model.model_path
