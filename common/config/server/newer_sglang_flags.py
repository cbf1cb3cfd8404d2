"""Server flags that SGLang got after 0.5.2, up to 0.5.23, and that are not ours under the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...api.errors import ConfigError
from ..foreign_flags import Automatic, Foreign, Mapped, Refused


def _groups(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {} if values[0] == "1" else {"enable_dp_attention": True, "dp_size": values[0]}


def _renamed(field: str) -> Mapped:
    return Mapped(lambda values, ours: {field: values[0]}, f"--{field.replace('_', '-')}", "1")


def _sizes(field: str) -> Mapped:
    return Mapped(lambda values, ours: {field: tuple(values)}, f"--{field.replace('_', '-')}", "*")


def _whitespace(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {"constrained_json_whitespace_pattern": rf"[ \t\n\r]{{0,{values[0]}}}"}


def _detokenizers(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    given = ours.get("tokenizer_worker_num", 1)
    return {"tokenizer_worker_num": max(int(values[0]), given) if values[0].isdigit() else values[0]}


def _never_preempt(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {"priority_scheduling_preemption_threshold": 2**32} if ours.get("enable_priority_scheduling") else {}


def _graphs(usual: str, disables: str) -> Callable[[Sequence[str], Mapping[str, Any]], dict[str, Any]]:
    """Makes what maps a kind of CUDA graphs: the ``usual`` one is Baton's."""
    def mapped(values: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
        if values[0] not in (usual, "disabled"):
            raise ConfigError(f"CUDA graphs are of one kind here: give {usual} or disabled, not {values[0]}.")
        return {disables: True} if values[0] == "disabled" else {}

    return mapped


def _all(outcome: Foreign, names: str) -> dict[str, Foreign]:
    return {f"--{name}": outcome for name in names.split()}


NEWER: dict[str, Foreign] = {
    # ------------------------------------------------------------------ other flags here
    **_all(Mapped(_groups, "--enable-dp-attention with --dp-size", "1"), "attn-dp-size attention-data-parallel-size"),
    **_all(_renamed("cuda_graph_max_bs"), "cuda-graph-max-bs-decode"),
    **_all(_renamed("piecewise_cuda_graph_max_tokens"), "cuda-graph-max-bs-prefill"),
    **_all(_sizes("cuda_graph_bs"), "cuda-graph-bs-decode"),
    **_all(_sizes("piecewise_cuda_graph_tokens"), "cuda-graph-bs-prefill"),
    **_all(Mapped(lambda values, ours: {"disable_piecewise_cuda_graph": True}, "--disable-piecewise-cuda-graph"),
           "disable-prefill-cuda-graph"),
    **_all(Mapped(_graphs("full", "disable_decode_cuda_graph"),
                  "--disable-decode-cuda-graph for disabled; full is so anyway", "1"), "cuda-graph-backend-decode"),
    **_all(Mapped(_graphs("breakable", "disable_piecewise_cuda_graph"),
                  "--disable-piecewise-cuda-graph for disabled; breakable is so anyway", "1"),
           "cuda-graph-backend-prefill"),
    **_all(Mapped(_never_preempt, "--priority-scheduling-preemption-threshold, beyond all priorities"),
           "disable-priority-preemption"),
    **_all(Mapped(_detokenizers, "--tokenizer-worker-num: the same processes detokenize", "1"),
           "detokenizer-worker-num"),
    **_all(Mapped(_whitespace, "--constrained-json-whitespace-pattern", "1"), "constrained-json-max-whitespace-cnt"),
    **_all(Mapped(lambda values, ours: {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
           "enable-hicache disaggregation-decode-enable-offload-kvcache"),
    **_all(Mapped(lambda values, ours: {"disable_custom_all_reduce": True},
                  "--disable-custom-all-reduce: sums are fused with norms where they go through peer memory"),
           "enforce-disable-flashinfer-allreduce-fusion"),
    **_all(Mapped(lambda values, ours: {"kv_checksum": "full"}, "--kv-checksum full"),
           "disaggregation-enable-kv-checksum"),
    # ------------------------------------------------------------------ always so here
    **_all(Automatic("kernels are chosen by the shapes of a step", "1"),
           "fp8-gemm-backend bf16-gemm-backend triton-attention-split-tile-size speculative-moe-runner-backend "
           "enable-lean-attention boundary-reduction flashinfer-allreduce-fusion-backend deepep-v2-mode "
           "deepep-dispatcher-output-dtype flashinfer-a2a-dispatch-type"),
    **_all(Automatic("kernels are chosen by the shapes of a step"),
           "disable-flashinfer-autotune enable-fused-qk-norm-rope no-enable-fused-qk-norm-rope no-enable-tf32-matmul "
           "enable-torch-symm-mem enable-fused-moe-sum-all-reduce enable-tp-lm-head-all-to-all "
           "no-enable-tp-lm-head-all-to-all enable-dp-attention-local-control-broadcast "
           "enable-attn-tp-input-scattered disable-attn-tp-gather enable-single-batch-overlap "
           "enforce-shared-experts-fusion enable-nvidia-megakernel"),
    **_all(Automatic("kernels are chosen by the shapes of a step", "*"), "flashinfer-autotune-skip-ops"),
    **_all(Automatic("kernels and connections are warm before a server is ready"), "pre-warm-nccl"),
    **_all(Automatic("/release_memory_occupation copies weights to host memory"),
           "enable-weights-cpu-backup enable-draft-weights-cpu-backup"),
    **_all(Automatic("loads are counted where requests arrive", "1"), "load-snapshot-publish-interval"),
    **_all(Automatic("transfers are watched all the time", "1"), "disaggregation-decode-polling-interval"),
    **_all(Automatic("a decode server keeps a prefix cache"), "disaggregation-decode-enable-radix-cache"),
    **_all(Automatic("decode reserves pages as requests arrive", "1"),
           "disaggregation-decode-extra-slots disaggregation-decode-host-receive-threshold "
           "optimistic-prefill-attempts"),
    **_all(Automatic("prompts are tokenized as they arrive, large ones in threads"), "enable-dynamic-batch-tokenizer"),
    **_all(Automatic("prompts are tokenized as they arrive, large ones in threads", "1"),
           "dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout"),
    **_all(Automatic("the processes of --tokenizer-worker-num share the port by SO_REUSEPORT"),
           "enable-http-worker-reuseport"),
    **_all(Automatic("each event of a stream is sent as it comes", "1"), "batch-notify-size"),
    **_all(Automatic("the least urgent requests are retracted first, of these the youngest", "1"), "retraction-policy"),
    **_all(Automatic("each answer is decoded by itself"), "disable-tokenizer-batch-decode"),
    **_all(Automatic("/open_session needs no flag"), "enable-streaming-session"),
    **_all(Automatic("ranks read the checkpoint through the page cache"), "weight-loader-prefetch-checkpoints"),
    **_all(Automatic("ranks read the checkpoint through the page cache", "1"), "weight-loader-prefetch-num-threads"),
    **_all(Automatic("collections do not stop a server: loaded objects are frozen", "*"), "gc-threshold"),
    **_all(Automatic("chunks follow each other through the stages without a limit", "1"), "pp-async-batch-depth"),
    **_all(Automatic("--speculative-adaptive measures costs itself", "1"), "speculative-adaptive-config"),
    **_all(Automatic("the longest match drafts, in requests or in --speculative-ngram-external-corpus-path", "1"),
           "speculative-ngram-external-sam-budget"),
    **_all(Automatic("drafts are accepted where they equal the sample, which changes no token's distribution"),
           "speculative-use-rejection-sampling speculative-use-block-verification"),
    **_all(Automatic("items of /v1/score share the query in the prefix cache"), "enable-mis"),
    **_all(Automatic("torch.compile is off"), "enable-torch-compile-debug-mode"),
    # ------------------------------------------------------------------ refused
    **_all(Refused("it is for other accelerators; GPUs are NVIDIA's here"),
           "mlx-enable-sampling enable-amd-monokernel monokernel-backend enable-aiter-allreduce-fusion "
           "disable-aiter-allreduce-fusion-in-prefill disable-aiter-allreduce-fusion-in-decode fuseep-mode "
           "c128-page-size"),
    **_all(Refused("images, video and audio are not supported"),
           "encoder-only language-only language-model-only encoder-transfer-backend encoder-urls "
           "encoder-bootstrap-port encoder-register-urls enable-adaptive-dispatch-to-encoder "
           "enable-broadcast-mm-inputs-process enable-prefix-mm-cache mm-enable-dp-encoder no-mm-enable-dp-encoder "
           "mm-process-config mm-processor-worker-num mm-io-worker-num allowed-media-domains "
           "media-url-max-file-size-mb mm-preprocess-cache-size-mb trust-mm-content-hashes limit-mm-data-per-request "
           "enable-mm-global-cache image-processor-backend mm-global-cache-backend mm-feature-transport "
           "enable-precise-embedding-interpolation asr-max-buffer-seconds asr-max-concurrent-sessions"),
    **_all(Refused("adapters are not supported; merge the adapter into the checkpoint"),
           "enable-lora-overlap-loading lora-eviction-policy max-lora-chunk-size experts-shared-outer-loras "
           "no-experts-shared-outer-loras lora-use-virtual-experts lora-strict-loading no-lora-strict-loading "
           "lora-drain-wait-threshold uno-lora-path"),
    **_all(Refused("states are kept at the ends of prompts, of their chunks and of answers, and evicted with their own "
                   "order; size their pool by --max-mamba-cache-size"),
           "mamba-max-states-per-path mamba-radix-cache-strategy mamba-track-interval"),
    **_all(Refused("states are kept in --mamba-ssm-dtype, float32 or bfloat16, and computed by Baton's own kernels"),
           "mamba-backend enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds "
           "enable-int8-mamba-checkpoint int8-mamba-ckpt-size linear-attn-backend linear-attn-decode-backend "
           "linear-attn-prefill-backend "
           "linear-attn-verify-backend enable-linear-replayssm linear-replayssm-cache-len enable-linear-replayssm-spec "
           "enable-scattered-sconv"),
    **_all(Refused("models with sparse attention are not supported"),
           "dsa-prefill-backend dsa-decode-backend dsa-triton-union dsa-paged-mqa-logits-backend dsa-topk-backend "
           "dsv4-prefill-backend dsv4-attn-backend enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay "
           "no-enable-decoder-swa-bounded-replay enable-deepseek-v4-fp4-indexer enable-dsa-fused-indexer "
           "no-enable-dsa-fused-indexer qsa-indexer-dtype enable-hisparse hisparse-config "
           "hierarchical-sparse-attention-extra-config enable-return-indexer-topk speculative-dsa-topk-backend "
           "enable-dsa-cache-layer-split cuda-graph-prefill-max-context context-bucket swa-prefix-tails"),
    **_all(Refused("diffusion models are not supported"),
           "dllm-algorithm dllm-algorithm-config dllm-fdfo no-dllm-fdfo"),
    **_all(Refused("contexts are not split over ranks; use --tp-size, or --pp-size for prompts", ("1",)),
           "dcp-size decode-context-parallel-size attn-cp-size attention-context-parallel-size"),
    **_all(Refused("contexts are not split over ranks; use --tp-size, or --pp-size for prompts"),
           "dcp-comm-backend dcp-replicate-q-proj no-dcp-replicate-q-proj enable-prefill-cp cp-strategy "
           "enable-cp-decode-attn-tp enable-kv-cache-sharding enable-layernorm-sp enable-megamoe-for-layernorm-sp"),
    **_all(Refused("experts are spread by --ep-size alone; use that", ("1",)),
           "moe-dp-size moe-data-parallel-size dwdp-size"),
    **_all(Refused("dense layers and shared experts are split over all ranks; leave it out"),
           "enable-shared-experts-attn-tp shared-experts-tp-size enable-dense-mlp-attn-tp enable-waterfill"),
    **_all(Refused("the ranks of a server are fixed at its start; add servers to the router instead"),
           "elastic-ep-backend enable-elastic-expert-backup elastic-ep-join-mode elastic-ep-scale-timeout "
           "elastic-ep-join-rank-offset elastic-ep-initial-size max-ep-size mooncake-ib-device gated-launch-port "
           "use-ray"),
    **_all(Refused("layers compute on the GPU; --cpu-offload-gb streams whole layers from host memory, use that"),
           "kt-weight-path kt-method kt-cpuinfer kt-threadpool-count kt-num-gpu-experts "
           "kt-max-deferred-experts-per-token enable-paged-experts paged-experts-num-resident ple-offload-embedding "
           "no-ple-offload-embedding ple-offload-backend ple-offload-dir"),
    **_all(Refused("weights and activations in 4 bits are not computed with; use --quantization fp8"),
           "fp4-gemm-backend prefill-kv-cache-dequant-dtype enable-w4a4-mxfp4-megamoe "
           "speculative-enable-w4a4-mxfp4-megamoe no-speculative-enable-w4a4-mxfp4-megamoe modelopt-quant "
           "modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path quantize-and-serve "
           "rl-quant-profile"),
    **_all(Refused("sums of ranks are in the model's type; leave it out"), "enable-quant-communications"),
    **_all(Refused("--hicache-size and --hicache-ratio set the host memory of --enable-hierarchical-cache; use these"),
           "hicache-host-memory-fraction"),
    **_all(Refused("host memory keeps what it is given until it needs the room; leave it out", ("cache",)),
           "hicache-host-memory-mode"),
    **_all(Refused("a prefetch is not tried again: what it lacks is computed; leave it out"),
           "hicache-storage-prefetch-retry-poll-interval hicache-storage-prefetch-retry-max-attempts"),
    **_all(Refused("the prefix cache has its own tiers; use --enable-hierarchical-cache with "
                   "--hicache-storage-backend"),
           "enable-unified-cache-external-linker unified-cache-external-linker-backend "
           "unified-cache-external-linker-config enable-linker-mla-dedup lmcache-config-file enable-flexkv "
           "flexkv-config-file radix-cache-backend"),
    **_all(Refused("pages are evicted by --radix-eviction-policy; leave it out"),
           "enable-session-radix-cache strip-thinking-cache"),
    **_all(Refused("the pools of a model with windows are sized by --swa-full-tokens-ratio; use that"),
           "enable-page-major-kv-layout enable-unified-memory prefill-only-disable-kv-cache"),
    **_all(Refused("retracted requests keep their KV cache by --retract-host-memory-gb; use that", ("none",)),
           "disaggregation-decode-retraction-backup"),
    **_all(Refused("decode allocates a request's pages when prefill starts; leave it out", ("early",)),
           "disaggregation-decode-allocation-policy"),
    **_all(Refused("one GPU is not divided between prompts and decode steps; use --enable-mixed-chunk"),
           "pdmux-config-path"),
    **_all(Refused("the server that verifies drafts makes them; see --speculative-algorithm", ("null",)),
           "decoupled-spec-role"),
    **_all(Refused("the server that verifies drafts makes them; see --speculative-algorithm"),
           "decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank spec-trace-dir"),
    **_all(Refused("drafts are EAGLE's, EAGLE3's, NEXTN's, STANDALONE's or NGRAM's; see --speculative-algorithm"),
           "speculative-dflash-block-size speculative-domino-candidate-pool-size speculative-dspark-block-size "
           "speculative-dspark-sps-table-path speculative-dspark-confidence-sts-path "
           "speculative-dspark-align-verify-tokens-to-graph-tier enable-multi-layer-eagle"),
    **_all(Refused("the draft model runs as the model does; leave it out"),
           "speculative-draft-window-size speculative-draft-sink-size speculative-moe-a2a-backend"),
    **_all(Refused("answers get no watermark"), "enable-watermark watermark-config"),
    **_all(Refused("--enable-return-hidden-states returns the last layer's; use that"),
           "return-hidden-states-mode enable-return-aux-hidden-states return-aux-hidden-state-layer-ids"),
    **_all(Refused("--enable-expert-distribution-metrics reports how evenly experts are used; use that"),
           "expert-balancedness-report-mode"),
    **_all(Refused("answers have no such field; leave it out"),
           "sampling-mask-max-tokens"),
    **_all(Refused("--disable-cuda-graph, --cuda-graph-bs and --disable-piecewise-cuda-graph say what is captured; use "
                   "these"),
           "cuda-graph-config cuda-graph-max-seq-len-prefill debug-cuda-graph"),
    **_all(Refused("--enable-deterministic-inference gives the same tokens in every batch; use that"),
           "rl-on-policy-target"),
    **_all(Refused("config.json is read as it is; leave it at auto", ("auto",)), "model-config-parser"),
    **_all(Refused("weights of a running server come over NCCL between GPUs, over gloo between CPUs; leave it out",
                   ("nccl",)),
           "remote-instance-weight-loader-backend"),
    **_all(Refused("checkpoints are safetensors or torch's .bin files on a disk or the hub"),
           "remote-instance-weight-loader-start-seed-via-transfer-engine engine-info-bootstrap-port "
           "modelexpress-config decrypted-config-file decrypted-draft-config-file "
           "weight-cache-socket weight-cache-timeout"),
    **_all(Refused("checkpoints are read from a disk; leave it out", ("off", "serial")),
           "weight-cache-mode startup-weight-load-mode"),
    **_all(Refused("/metrics and /get_load tell how busy a server is; use these"),
           "enable-mfu-metrics load-publish-endpoint enable-forward-pass-metrics forward-pass-metrics-worker-id "
           "forward-pass-metrics-ipc-name"),
    **_all(Refused("requests are traced; leave it out", ("request",)), "trace-modules"),
    **_all(Refused("KV pages are compared after transfers (--kv-checksum); leave it out", ("none",)),
           "kv-canary kv-canary-real-data"),
    **_all(Refused("KV pages are compared after transfers (--kv-checksum); leave it out"), "kv-canary-sweep-interval"),
    **_all(Refused("--debug-tensor-dump-output-folder dumps what the model's modules compute; use that"),
           "msprobe-dump-config"),
    **_all(Refused("prompts and decode steps share the engine by --chunked-prefill-size, --max-prefill-tokens and "
                   "--enable-mixed-chunk; use these"),
           "prefill-decode-interval enable-dynamic-chunking enable-prefill-delayer "
           "prefill-delayer-max-delay-passes prefill-delayer-token-usage-low-watermark "
           "prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets "
           "prefill-delayer-queue-min-ratio prefill-delayer-max-delay-ms min-free-slots-delay"),
    **_all(Refused("prompts and decode steps share the engine by --chunked-prefill-size, --max-prefill-tokens and "
                   "--enable-mixed-chunk; use these", ("0",)), "prefill-decode-interval-min-bs"),
    **_all(Automatic("answers of /v1/responses are stored, within --response-store-entries"),
           "enable-response-store"),
    **_all(Refused("tokenizers are those of Hugging Face; leave it out", ("huggingface",)), "tokenizer-backend"),
    **_all(Refused("servers speak HTTP/1.1 at the paths of their documents; put a proxy before the router"),
           "smg-grpc-mode grpc-mode grpc-port "
           "grpc-response-timeout-secs sidecar sidecar-args enable-http2 http2-max-concurrent-streams "
           "http2-initial-connection-window-size "
           "smg-http-sidecar-port grpc-http-sidecar-port"),
    **_all(Refused("grammars begin after the reasoning; leave it out"), "enable-strict-thinking"),
}
