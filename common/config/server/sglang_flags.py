"""SGLang's server flags that are not ours under the same name: those that are always on here, those that are other
flags here, and those that are refused with a reason. Facts are of its version 0.5.2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...api.errors import ConfigError
from ..foreign_flags import Automatic, Foreign, ForeignFlags, Mapped, Refused, Values
from .newer_sglang_flags import NEWER


def _prefill_attention(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_backend": ATTENTION.to.get(values[0], values[0])}


def _whole_experts(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Experts on as many ranks as there are, unless --ep-size says how many."""
    return {} if "ep_size" in ours else {"ep_size": ours.get("tp_size", 1)}


def _dispatched_experts(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """DeepEP's exchange: by peer memory between attention groups of one rank, else by all-to-all."""
    if values and values[0] != "deepep":
        return {"moe_a2a_backend": values[0]}
    ranks = ours.get("tp_size", 1)
    groups = ours.get("dp_size", 1) if ours.get("enable_dp_attention") else 1
    return {**_whole_experts(values, ours), "moe_a2a_backend": "peer" if 1 < groups == ranks else "alltoall"}


def _kv_events(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """``{"publisher": "zmq", "endpoint": "tcp://*:5557", ...}``: the port of the endpoint."""
    try:
        config = json.loads(values[0])
        publisher, endpoint = config.get("publisher", "null"), config.get("endpoint", "tcp://*:5557")
        port = int(endpoint.rpartition(":")[2])
    except (ValueError, AttributeError, IndexError):
        raise ConfigError("--kv-events-config takes a JSON object with publisher and endpoint (tcp://*:PORT); "
                          "--kv-events-port PORT says the same.") from None
    return {"kv_events_port": port} if publisher == "zmq" else {}


def _rdma_devices(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Devices are for Mooncake, which is SGLang's default backend."""
    backend = {} if "disaggregation_transfer_backend" in ours else {"disaggregation_transfer_backend": "mooncake"}
    return {"disaggregation_ib_device": values[0], **backend}


def _micro_batch(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {"pp_max_micro_batch_size": values[0]} if ours.get("pp_size", 1) > 1 else {}


def _even_split(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The share of tokens of the smaller micro-batch below which a request is split: here one in the middle always is,
    so that the batches are even. 0 asks for none to be."""
    try:
        share = float(values[0])
    except ValueError:
        share = -1
    if not 0 < share <= 0.5:
        raise ConfigError("--tbo-token-distribution-threshold must be above 0 and at most 0.5: a request in the middle "
                          "of a step that --enable-two-batch-overlap splits is split, too.")
    return {}


def _host_layout(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    if values[0] not in (known := ("layer_first", "page_first", "page_first_direct", "page_head")):
        raise ConfigError(f"--hicache-mem-layout must be {', '.join(known[:-1])} or {known[-1]}, not {values[0]!r}.")
    return {}


_TORCHAO = {"": None, "int8dq": "w8a8_int8", "fp8dq-per_row": "fp8", "fp8dq-per_tensor": "fp8_per_tensor",
            **{name: name for name in ("int8wo", "int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256")}}
"""``--quantization`` by the values of ``--torchao-config``."""


def _torchao(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    if values[0] not in _TORCHAO:
        raise ConfigError(f"--torchao-config {values[0]} is not supported: use {', '.join(filter(None, _TORCHAO))}.")
    if not (format_name := _TORCHAO[values[0]]):
        return {}
    if ours.get("quantization") is not None:
        raise ConfigError("--torchao-config and --quantization both quantize weights: leave one of them out.")
    return {"quantization": format_name}


def _refused(reason: str, *names: str, harmless: tuple[str, ...] = ()) -> dict[str, Foreign]:
    return dict.fromkeys(names, Refused(reason, harmless))


_NO_MEDIA = "images, video and audio are not supported"
_NO_LORA = "adapters are not supported; merge the adapter into the checkpoint"
_NO_LMCACHE = "the prefix cache has its own tiers; use --enable-hierarchical-cache with --hicache-storage-backend"
_OFFLOAD_MODE = ("layers of --cpu-offload-gb and --offload-group-size are in the host memory of the rank that computes "
                 "them, and ranks have different parts of a layer, which they cannot share; leave it at cpu")
_NO_MULTIPLEX = ("one GPU is not divided between prompts and decode steps; use --enable-mixed-chunk, or prefill and "
                 "decode servers")
_EXPERT_KERNELS = "the kernel of the experts is chosen by the shape of a step"
_BY_HANDSHAKE = "prefill and decode servers learn each other's layout in their handshake"
_SMALL_SUMS = "small sums of ranks go through peer memory where peers reach each other"
_NO_COMPILE = ("decode steps are fused kernels in CUDA graphs as they are, and torch.compile, which cannot trace their "
               "launchers, made steps slower where it was tried, on a CPU: it is off")

ATTENTION = Values(
    to={"fa3": "flashinfer", "flashmla": "flashinfer", "cutlass_mla": "flashinfer", "torch_native": "torch",
        "intel_amx": "torch", "fa4": "auto", "flex_attention": "torch"},
    refused={**dict.fromkeys(("trtllm_mla", "trtllm_mha"), "TensorRT-LLM's kernels are not used; leave it at auto"),
             **dict.fromkeys(("aiter", "wave", "ascend", "intel_xpu"),
                             "it is for other accelerators; GPUs are NVIDIA's "
                             "here"),
             "dual_chunk_flash_attn": "attention to chunks of a long context is not supported",
             "hybrid_linear_attn": "recurrent layers have kernels of their own; leave it at auto"})

VALUES: dict[str, Values] = {
    "--attention-backend": ATTENTION,
    "--decode-attention-backend": ATTENTION,
    "--sampling-backend": Values({"pytorch": "torch", "flashinfer": "auto"}),
    "--dtype": Values({"half": "float16", "float": "float32"}),
    "--kv-cache-dtype": Values({"bf16": "auto", "bfloat16": "auto"}),
    "--model-impl": Values({"sglang": "baton"}),
    "--log-level": Values({"critical": "error"}),
    "--log-level-http": Values({"critical": "error"}),
    "--quantization": Values(refused={
        **dict.fromkeys(("modelopt_fp4", "petit_nvfp4"),
                        "NVFP4 needs GPUs newer than Hopper; use a checkpoint in float8 or of AWQ"),
        **dict.fromkeys(("marlin", "qoq", "w4afp8"),
                        "no kernel multiplies its weights; use fp8 or int4wo-128, or a checkpoint of AWQ or GPTQ")}),
    "--load-format": Values({"bitsandbytes": "auto"}),
    "--disaggregation-transfer-backend": Values(refused=dict.fromkeys(
        ("ascend", "mori"), "it is for other accelerators; use nixl, mooncake or ipc")),
    "--device": Values(refused=dict.fromkeys(
        ("xpu", "hpu", "npu", "rocm", "mps", "musa", "tpu"), "engines run on NVIDIA GPUs (cuda) and on the CPU")),
    "--hicache-storage-backend": Values(refused=dict.fromkeys(
        ("hf3fs", "aibrix", "lmcache", "eic", "flexkv", "dynamic", "mori", "simm", "umbp", "mmap", "shm"),
        "pages are kept in files, in Mooncake Store or behind NIXL; use file, mooncake or nixl")),
    # Over the ranks that are alive: here all are, because a server ends with any of its ranks.
    "--eplb-algorithm": Values({"elasticity_aware": "deepseek"}),
    "--speculative-num-draft-tokens": Values({"64": "63"}),  # in the documents; trees have at most 63 rows
    "--expert-distribution-recorder-mode": Values({"stat_approx": "stat"}),  # counts are exact in every mode
}

_AUTOMATIC: dict[str, Foreign] = {
    "--nccl-port": Automatic("the ranks' port is a free one that the system chooses", "1"),
    "--tokenizer-mode": Automatic("there is one implementation of each tokenizer", "1"),
    "--sleep-on-idle": Automatic("an idle rank waits for requests without computing"),
    "--enable-metrics": Automatic("/metrics is always on"),
    "--decode-log-interval": Automatic("a line is logged every --log-interval seconds while requests run", "1"),
    "--skip-server-warmup": Automatic("a server sends itself no requests at start"),
    "--warmups": Automatic("the kernels of all sizes are warm before a server is ready", "1"),
    "--prefill-round-robin-balance": Automatic("the bootstrap room names the attention group"),
    "--enable-tokenizer-batch-encode": Automatic("the prompts of a request are tokenized together"),
    "--moe-runner-backend": Automatic(_EXPERT_KERNELS, "1"),
    **dict.fromkeys(("--enable-flashinfer-cutlass-moe", "--enable-flashinfer-trtllm-moe", "--enable-triton-kernel-moe",
                     "--enable-flashinfer-mxfp4-moe"), Automatic(_EXPERT_KERNELS)),
    "--flashinfer-mxfp4-moe-precision": Automatic("experts in MXFP4 take activations in the model's type", "1"),
    "--enable-torch-compile": Automatic(_NO_COMPILE),
    "--torch-compile-max-bs": Automatic(_NO_COMPILE, "1"),
    "--enable-flashinfer-allreduce-fusion": Automatic("sums of ranks are fused with the norm after them"),
    "--enable-symm-mem": Automatic(_SMALL_SUMS),
    "--enable-mscclpp": Automatic(_SMALL_SUMS),
    "--enable-nccl-nvls": Automatic("NCCL decides by itself; NCCL_NVLS_ENABLE in the environment overrules it"),
    "--enable-p2p-check": Automatic("peer access is tried at start"),
    "--deepep-config": Automatic("--moe-a2a-backend peer has no settings to tune", "1"),
    "--deepep-mode": Automatic("--moe-a2a-backend peer has a way for prompts and one for decode steps", "1"),
    "--triton-attention-reduce-in-fp32": Automatic("attention always adds up in float32"),
    "--triton-attention-num-kv-splits": Automatic("decode attention splits contexts by their lengths", "1"),
    "--flashinfer-mla-disable-ragged": Automatic("prompts of latent attention have kernels of their own"),
    "--disable-chunked-prefix-cache": Automatic("prompts of latent attention have kernels of their own"),
    "--enable-memory-saver": Automatic("/release_memory_occupation needs no flag"),
    "--disable-shared-experts-fusion": Automatic("shared experts are computed apart from the routed ones"),
    "--disable-fast-image-processor": Automatic("no images are processed"),
    "--disable-outlines-disk-cache": Automatic("grammars are not cached on disk"),
    "--disable-flashinfer-cutlass-moe-fp4-allgather": Automatic("rows of experts travel in 16 bits"),
    "--enable-cudagraph-gc": Automatic("capturing graphs collects no garbage"),
    "--num-continuous-decode-steps": Automatic("a step is launched while the one before runs", "1"),
    "--scheduler-recv-interval": Automatic("requests are received while steps run", "1"),
    **dict.fromkeys(("--disaggregation-decode-tp", "--disaggregation-decode-dp", "--disaggregation-prefill-pp"),
                    Automatic(_BY_HANDSHAKE, "1")),
    "--num-reserved-decode-tokens": Automatic("the reserve follows --schedule-conservativeness", "1"),
}

_MAPPED: dict[str, Foreign] = {
    "--prefill-attention-backend": Mapped(_prefill_attention, "--attention-backend", "1"),
    "--moe-a2a-backend": Mapped(_dispatched_experts, "the same; deepep is peer where each rank is an attention group, "
                                "else alltoall, and sets --ep-size to --tp-size", "1"),
    "--enable-ep-moe": Mapped(_whole_experts, "--ep-size, as large as --tp-size"),
    "--enable-deepep-moe": Mapped(_dispatched_experts, "--moe-a2a-backend, as deepep there"),
    "--max-micro-batch-size": Mapped(_micro_batch, "--pp-max-micro-batch-size, with --pp-size above 1", "1"),
    "--kv-events-config": Mapped(_kv_events, "--kv-events-port, the port of its endpoint", "1"),
    "--disaggregation-ib-device": Mapped(_rdma_devices, "the same, and --disaggregation-transfer-backend mooncake "
                                         "where none is given", "1"),
    "--torchao-config": Mapped(_torchao, "--quantization, of that name, or w8a8_int8 for int8dq and fp8 for fp8dq",
                               "1"),
    "--tbo-token-distribution-threshold": Mapped(
        _even_split, "not needed: steps are split into halves of equal tokens", "1"),
    "--hicache-mem-layout": Mapped(
        _host_layout, "not needed: a page is whole in host memory, as page_first and page_first_direct ask", "1"),
    "--oltp-traces-endpoint": Mapped(lambda values, ours: {"otlp_traces_endpoint": values[0]},
                                     "--otlp-traces-endpoint", "1"),
}

_REFUSED: dict[str, Foreign] = {
    **_refused(_NO_MEDIA, "--enable-multimodal", "--mm-attention-backend"),
    **_refused(_NO_LORA, "--enable-lora", "--max-lora-rank", "--lora-target-modules", "--lora-paths",
               "--max-loras-per-batch", "--max-loaded-loras", "--lora-backend"),
    **_refused(_NO_LMCACHE, "--enable-lmcache"),
    **_refused(_OFFLOAD_MODE, "--offload-mode", harmless=("cpu", "shm_cpu")),
    **_refused(_NO_MULTIPLEX, "--enable-pdmux", "--sm-group-num"),
    **_refused("pools of layers with a window are sized by --swa-full-tokens-ratio; use that",
               "--hybrid-kvcache-ratio"),
}

SGLANG_FLAGS = ForeignFlags({**_AUTOMATIC, **_MAPPED, **_REFUSED, **NEWER}, VALUES, abbreviates=True)
"""Of ``sglang.launch_server``."""
