"""Rules on combinations of flags: each is triggered by a case, with its sentence."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import build
from baton.common.config.rules import Rule, at_least, check_own_rules, check_rules, json_object, rules_of
from baton.common.config.server import ServerConfig
from baton.router.config import RouterConfig
from baton.tests.helpers import dict_tier  # noqa: F401 (registers its tiers)

DP = {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}
DUMP = {"debug_tensor_dump_output_folder": "d"}
TOKENS = {"expert_distribution_recorder_mode": "per_token"}
EPLB = {"enable_eplb": True, "tp_size": 2, "ep_size": 2}
PP = {"pp_size": 2}
PREFILL, DECODE = {"disaggregation_mode": "prefill"}, {"disaggregation_mode": "decode"}
TREES = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "x", "speculative_eagle_topk": 2}
NGRAM = {"speculative_algorithm": "NGRAM"}
SEED = {"load_format": "remote_instance", "remote_instance_weight_loader_seed_instance_ip": "h",
        "remote_instance_weight_loader_seed_instance_service_port": 1,
        "remote_instance_weight_loader_send_weights_group_ports": "[2]"}
TIERS = {"enable_hierarchical_cache": True}
TRANSFORMERS = {"model_impl": "transformers"}
FIXED = {"enable_deterministic_inference": True}
SPARSE = {"enable_double_sparsity": True, "ds_channel_config_path": "x"}
HTTPS = {"ssl_certfile": "c", "ssl_keyfile": "k"}
ROUTED = {"enable_return_routed_experts": True}
FP32 = {"enable_fp32_lm_head": True}
SWITCH = {"enable_pd_role_switch": True}
SERVERS: list[tuple[dict[str, Any], str]] = [
    (SWITCH | PP, "--enable-pd-role-switch does not work across the stages of --pp-size: leave one of them out"),
    (SWITCH | NGRAM, "--enable-pd-role-switch does not work with drafts, whose state differs between the roles"),
    (SWITCH | {"is_embedding": True}, "--enable-pd-role-switch is for servers that generate: leave it or --is-emb"),
    (SWITCH | {"tokenizer_worker_num": 2}, "--enable-pd-role-switch needs the API server in one process: leave"),
    (PP | {"enable_return_hidden_states": True}, "--enable-return-hidden-states does not work across the stages"),
    ({"constrained_json_whitespace_pattern": " ", "constrained_json_disable_any_whitespace": True}, "exclude each"),
    (ROUTED | PP, "--enable-return-routed-experts needs ranks that choose the experts of all layers and tokens: leave"),
    (ROUTED | NGRAM, "--enable-return-routed-experts is for servers that generate by Baton's own layers, without draf"),
    (FIXED | {"is_embedding": True}, "--enable-deterministic-inference is for servers that generate: leave it out"),
    (FIXED | TRANSFORMERS, "--enable-deterministic-inference fixes the order of Baton's own layers: leave --model-im"),
    (FIXED | {"decode_attention_backend": "flashinfer"}, "--enable-deterministic-inference needs attention that adds"),
    (FIXED | DP, "--enable-deterministic-inference does not hold between attention groups, which exchange rows"),
    (FIXED | {"moe_a2a_backend": "alltoall"}, "--enable-deterministic-inference adds up experts in the order of ranks"),
    (FIXED | {"enable_eplb": True, "tp_size": 2, "ep_size": 2}, "--enable-deterministic-inference needs experts that"),
    (FIXED | {"speculative_accept_threshold_acc": 0.9}, "leave --speculative-accept-threshold-single and"),
    (FIXED | NGRAM | {"speculative_simulate_acceptance": "2"}, "plain decoding: leave --speculative-simulate-"),
    (FIXED | TREES, "--enable-deterministic-inference verifies chains, whose keys"),
    ({"enable_double_sparsity": True}, "--enable-double-sparsity needs --ds-channel-config-path FILE"),
    ({"ds_heavy_token_num": 64}, "--ds-channel-config-path and the other --ds- flags need --enable-double-sparsity."),
    (SPARSE | {"is_embedding": True}, "--enable-double-sparsity is for servers that generate"),
    (SPARSE | TRANSFORMERS, "--enable-double-sparsity needs Baton's own layers: leave --model-impl transformers out."),
    (SPARSE | FIXED, "--enable-double-sparsity chooses tokens by length and load, and --enable-deterministic-"),
    (SPARSE | NGRAM, "--enable-double-sparsity is for decode steps of one row a request, and drafts are verified in"),
    (SPARSE | {"decode_attention_backend": "flashinfer"}, "--enable-double-sparsity decodes by Baton's own kernels"),
    ({"quantization_param_path": "scales.json"}, "--quantization-param-path is for a KV cache in float8: set --kv-"),
    (TIERS | {"retract_host_memory_gb": 1.0}, "--enable-hierarchical-cache keeps retracted requests too: leave --retr"),
    (TIERS | {"disable_radix_cache": True}, "--enable-hierarchical-cache keeps pages of the prefix cache; drop"),
    (PP | TIERS | {"hicache_storage_backend": "file"}, "--hicache-storage-backend stores pages of all layers, and the"),
    (PP | TIERS | {"hicache_size": 1.0}, "need memory for the same pages: use --hicache-ratio."),
    ({"hicache_storage_backend": "file"}, "--hicache-storage-backend is behind the host memory of --enable-hierarch"),
    ({"kv_tier": "dict"}, "--kv-tier dict needs --enable-hierarchical-cache."),
    (TIERS | {"kv_tier": "dict", "hicache_storage_backend": "file"}, "--hicache-storage-backend fills host memory"),
    ({"radix_eviction_policy": "lfu", "disable_radix_cache": True},
     "--radix-eviction-policy orders the pages of the prefix cache; drop --disable-radix-cache, or leave it out."),
    ({"radix_eviction_policy": "priority"}, "--radix-eviction-policy priority needs --enable-priority-scheduling."),
    ({"disaggregation_ib_device": "mlx5_0"}, "--disaggregation-ib-device is for --disaggregation-transfer-backend"),
    ({"kv_events_port": 7000, "disable_radix_cache": True}, "publishes the prefix cache; drop --disable-radix-cache."),
    (DP | {"kv_events_port": 7000}, "--kv-events-port publishes one prefix cache, and every attention group"),
    (PP | TRANSFORMERS, "--model-impl transformers splits a model over --tp-size alone: leave --pp-size, --ep-size"),
    (TRANSFORMERS | {"speculative_algorithm": "NEXTN"}, "--model-impl transformers shares no hidden states, embeddin"),
    ({"checkpoint_engine_wait_weights_before_ready": True, "is_embedding": True}, "-before-ready is for servers that"),
    (PREFILL | {"is_embedding": True}, "--is-embedding needs a unified server: leave --disaggregation-mode at null."),
    (PP | {"is_embedding": True}, "--is-embedding does not work across the stages of --pp-size: leave one of them"),
    (PREFILL | {"file_storage_path": "files"}, "--file-storage-path is for unified and decode servers"),
    (PREFILL | {"tool_server": "demo"}, "--tool-server is for unified and decode servers"),
    ({"schedule_low_priority_values_first": True}, "--schedule-low-priority-values-first needs --enable-priority-"),
    ({"priority_scheduling_preemption_threshold": 1}, "--priority-scheduling-preemption-threshold needs --enable-pri"),
    ({"default_priority_value": 1}, "--default-priority-value needs --enable-priority-scheduling."),
    ({"schedule_policy": "lpm", "disable_radix_cache": True}, "--schedule-policy lpm needs the prefix cache; drop"),
    (PREFILL | {"enable_mixed_chunk": True}, "--enable-mixed-chunk is for servers that decode; leave it out here."),
    (PP | {"enable_mixed_chunk": True}, "--enable-mixed-chunk does not work across the stages of --pp-size"),
    ({"is_embedding": True, "retract_host_memory_gb": 0.5}, "--retract-host-memory-gb is for servers that decode"),
    (PP | {"retract_host_memory_gb": 0.5}, "--retract-host-memory-gb does not work across the stages of --pp-size"),
    ({"offload_group_size": 0}, "--offload-group-size must be -1 or 1 or more, not 0."),
    ({"offload_group_size": 2, "cpu_offload_gb": 1.0}, "each choose the layers in host memory: give one of them."),
    ({"offload_group_size": 2, "offload_num_in_group": 3}, "--offload-num-in-group 3 must be 2 or less, the size of"),
    ({"offload_num_in_group": 2}, "--offload-num-in-group needs groups: set --offload-group-size too."),
    ({"offload_prefetch_step": 2}, "--offload-prefetch-step needs layers in host memory: set --cpu-offload-gb or"),
    (TRANSFORMERS | {"offload_group_size": 2}, "stream Baton's own layers: leave --model-impl transformers out."),
    ({"cpu_offload_gb": 1.0, "enable_eplb": True, "tp_size": 2, "ep_size": 2}, "--enable-eplb moves experts between"),
    ({"custom_weight_loader": ("loader",)}, "--custom-weight-loader takes package.module.function, not loader."),
    ({"numa_node": (-2,)}, "--numa-node takes numbers of nodes, or -1, not -2."),
    ({"ssl_certfile": "c"}, "--ssl-certfile and --ssl-keyfile go together: give both or none."),
    ({"enable_ssl_refresh": True}, "are for servers with a certificate: give --ssl-certfile and --ssl-keyfile."),
    (HTTPS | {"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 needs the authorities of clients' certificates: give --ssl-ca-"),
    ({"export_metrics_to_file": True}, "--export-metrics-to-file and --export-metrics-to-file-dir go together"),
    ({"log_requests_format": "text"}, "--log-requests-format and --log-requests-target are for the lines of --log-req"),
    ({"otlp_service_name": "x"}, "--otlp-service-name names spans: set --otlp-traces-endpoint or --enable-trace too."),
    ({"abort_on_priority_when_disabled": True, "enable_priority_scheduling": True}, "is for servers without --enable-"),
    (FP32 | {"is_embedding": True}, "--enable-fp32-lm-head is for servers that generate: leave it out with --is-emb"),
    (FP32 | TRANSFORMERS, "--enable-fp32-lm-head is for Baton's own heads: leave --model-impl transformers out."),
    (FP32 | FIXED, "--enable-fp32-lm-head multiplies by a library whose order of sums depends on the batch: leave"),
    (FIXED | {"enable_tf32_matmul": True}, "multiplies by kernels of its own: leave --enable-tf32-matmul out."),
    ({"chat_template": "chatml", "hf_chat_template_name": "rag"}, "and --hf-chat-template-name names one: give"),
    ({"model_checksum": "", "load_format": "dummy"}, "--model-checksum compares what is loaded, and --load-format dum"),
    ({"fastapi_root_path": "x"}, "--fastapi-root-path must be a path as /prefix, not 'x'."),
    ({"uvicorn_access_log_exclude_prefixes": ("/x",)}, "is about the HTTP log, which is off: give"),
    ({"delete_ckpt_after_loading": True, "load_format": "dummy"}, "and --load-format dummy loads nothing: leave one"),
    ({"model_loader_extra_config": '{"x": 1}'}, "enable_multithread_load and num_threads, not x."),
    ({"model_loader_extra_config": '{"num_threads": 0}'}, "and 1 to 256 for num_threads."),
    ({"pp_max_micro_batch_size": 2}, "--pp-max-micro-batch-size and --pp-layer-partition need a --pp-size above 1."),
    (PP | {"pp_layer_partition": (1, 2, 3)}, "1 or more layers for each of the 2 stages of --pp-size."),
    (PP | {"enable_eplb": True}, "need the experts of all layers in each rank: leave them out with --pp-size."),
    ({"ep_size": 3, "tp_size": 4}, "--ep-size 3 must be 1 or more and divide --tp-size 4."),
    ({"moe_a2a_backend": "alltoall", "tp_size": 4}, "--moe-a2a-backend alltoall needs whole experts on every rank:"),
    ({"ep_num_redundant_experts": 2}, "--enable-eplb and --ep-num-redundant-experts need several ranks with whole"),
    ({"eplb_rebalance_num_iterations": 5}, "--eplb-rebalance-num-iterations is for --enable-eplb: give both."),
    ({"eplb_rebalance_layers_per_chunk": 5}, "--eplb-rebalance-layers-per-chunk and --eplb-min-rebalancing-utiliz"),
    ({"eplb_algorithm": "deepseek"}, "--eplb-algorithm deepseek is for --enable-eplb and --init-expert-location: give"),
    ({"init_expert_location": "a.json"}, "--init-expert-location needs experts that have a place of their own: set"),
    (EPLB | {"eplb_min_rebalancing_utilization_threshold": 1.5}, "threshold must be above 0 and at most 1."),
    (EPLB | {"ep_dispatch_algorithm": "static"}, "--ep-dispatch-algorithm static is for tokens that are sent to"),
    (EPLB | {"expert_distribution_recorder_buffer_size": 0}, "--expert-distribution-recorder-buffer-size must be 1"),
    (TOKENS | {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "alltoall"}, "leave --moe-a2a-backend alltoall out, or"),
    (TOKENS | {"tp_size": 2, "enable_dp_attention": True, "dp_size": 2}, "per_token records the tokens of one"),
    ({"enable_expert_distribution_metrics": True}, "--enable-expert-distribution-metrics compares ranks with experts"),
    ({"expert_distribution_recorder_buffer_size": 9}, "--expert-distribution-recorder-buffer-size is for --expert-"),
    (SEED | PP, "--load-format remote_instance takes the weights of a server without stages: leave --pp-size out."),
    (SEED | EPLB, "--load-format remote_instance takes weights in their first places: leave --enable-eplb out."),
    (SEED | TREES, "--load-format remote_instance takes the weights of the model alone: leave --speculative-algorithm"),
    (PP | DECODE, "--pp-size is for prefill and unified servers: decode steps are too short for a pipeline; use --tp"),
    ({"moe_a2a_backend": "low_latency", "tp_size": 2}, "--moe-a2a-backend low_latency is for several ranks that each"),
    ({"dp_size": 2, "tp_size": 2}, "--dp-size 2 needs --enable-dp-attention; for whole replicas start several servers"),
    ({"enable_dp_lm_head": True}, "--enable-dp-attention and --enable-dp-lm-head need a --dp-size above 1: as large"),
    (DP | {"tp_size": 3}, "--dp-size 2 must divide --tp-size 3, which counts all ranks of the server."),
    (DP | PP, "--enable-dp-attention does not work across the stages of --pp-size: leave one of them out."),
    ({"debug_tensor_dump_layers": (1,)}, "--debug-tensor-dump-input-file need --debug-tensor-dump-output-folder."),
    (DUMP | {"debug_tensor_dump_input_file": "a.npy", "debug_tensor_dump_inject": True}, "takes the tensors of"),
    (DUMP | PP | {"debug_tensor_dump_input_file": "a.npy"}, "is computed by ranks that have all layers: leave --pp-s"),
    (DP | {"debug_tensor_dump_output_folder": "d", "enable_two_batch_overlap": True, "two_batch_min_tokens": 8},
     "--debug-tensor-dump-output-folder dumps whole steps: leave --enable-two-batch-overlap out."),
    ({"enable_profile_cuda_graph": True, "debug_tensor_dump_output_folder": "d"}, "--enable-profile-cuda-graph profil"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap overlaps the exchange of attention groups: it"),
    (DP | {"enable_two_batch_overlap": True, "moe_dense_tp_size": 1}, "every layer: leave --moe-dense-tp-size out."),
    (DP | {"enable_two_batch_overlap": True, "moe_a2a_backend": "peer", "ep_size": 2}, "--moe-a2a-backend peer: leave"),
    (DP | {"enable_two_batch_overlap": True}, "--two-batch-min-tokens 16384 or more, and no step has as many: raise"),
    ({"speculative_accept_threshold_acc": 0.0}, "--speculative-accept-threshold-acc must be above 0 and at most 1."),
    (NGRAM | {"speculative_ngram_min_match_window_size": 13}, "--speculative-ngram-min-match-window-size must be betw"),
    (NGRAM | {"speculative_ngram_external_corpus_path": "x", "speculative_ngram_capacity": 0}, "needs --speculative-a"),
    ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm EAGLE3 needs the folder or the name of its draft "),
    ({"speculative_draft_model_path": "x"}, "--speculative-draft-model-path is for EAGLE, EAGLE3, NEXTN and STAND"),
    ({"speculative_draft_model_quantization": "fp8"}, "--speculative-draft-model-quantization and --speculative-draf"),
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x",
      "speculative_draft_load_format": "sharded_state"}, "--speculative-draft-load-format sharded_state has the weig"),
    (NGRAM | {"speculative_draft_kv_cache_dtype": "auto"}, "are for EAGLE, EAGLE3, NEXTN and STANDALONE: name one of "),
    ({"speculative_token_map": "x"}, "--speculative-token-map restricts the vocabulary of EAGLE, NEXTN and STANDA"),
    ({"speculative_simulate_acceptance": "2"}, "--speculative-simulate-acceptance needs drafts: set --speculative-alg"),
    (NGRAM | DP | {"tp_size": 2, "speculative_adaptive": True}, "--speculative-adaptive measures steps of one"),
    ({"speculative_adaptive": True}, "--speculative-adaptive needs drafts: set --speculative-algorithm too."),
    (NGRAM | {"speculative_adaptive": True, "speculative_eagle_topk": 2}, "--speculative-adaptive chooses the length"),
    (NGRAM | {"speculative_ngram_min_bfs_breadth": 2}, "--speculative-ngram-min-bfs-breadth must be between 1 and"),
    (NGRAM | {"speculative_ngram_max_bfs_breadth": 2, "speculative_ngram_capacity": 0}, "needs the index of all req"),
    (NGRAM | {"speculative_eagle_topk": 2}, "--speculative-eagle-topk is for EAGLE, EAGLE3, NEXTN and STANDALONE: na"),
    (TREES | {"speculative_num_draft_tokens": 12}, "--speculative-num-draft-tokens 12 are more rows than --speculat"),
    (TREES | {"speculative_num_steps": 40}, "Trees of drafts have at most 63 rows, and at most 63 that are expanded"),
    (TREES | DP | {"enable_two_batch_overlap": True, "two_batch_min_tokens": 8}, "does not cut trees of drafts: drop"),
    (PREFILL | NGRAM, "--speculative-algorithm is for servers that decode; leave it out here."),
    (PP | NGRAM, "--speculative-algorithm does not work across the stages of --pp-size: leave one of them out."),
    ({"node_rank": 1}, "--node-rank 1 must be 0 or more and below --nnodes 1."),
    ({"nnodes": 2}, "--nnodes 2 needs the address where the hosts meet: set --dist-init-addr HOST:PORT"),
    ({"nnodes": 2, "dist_init_addr": "h:1", "tp_size": 3}, "--nnodes 2 must divide --tp-size 3, which counts the"),
    (PP | {"nnodes": 3, "dist_init_addr": "h:1", "tp_size": 4}, "must divide --tp-size 4 times --pp-size 2, which"),
]
POD = {"service_discovery": True}
ROUTERS: list[tuple[dict[str, Any], str]] = [
    (POD, "--service-discovery needs --selector, or --prefill-selector and --decode-selector."),
    ({"selector": ("a=b",)}, "Selectors need --service-discovery."),
    (POD | {"selector": ("a=b",), "pd_disaggregation": True}, "--selector is for whole workers; with --pd-disaggre"),
]


def rules(config: type) -> list[Rule[Any]]:
    hints = typing.get_type_hints(config)
    return [rule for _, rule in rules_of({field.name: hints[field.name] for field in dataclasses.fields(config)})]


@pytest.mark.parametrize(("config", "cases"), [(ServerConfig, SERVERS), (RouterConfig, ROUTERS)])
def test_each_rule_refuses_its_case_with_its_sentence(monkeypatch, config, cases):
    """A rule that no case triggers, or that another one always comes before, fails this test."""
    triggered, check = [], Rule.check

    def noticed(rule: Rule[Any], checked: Any) -> None:
        try:
            check(rule, checked)
        except ConfigError:
            triggered.append(rule)
            raise

    monkeypatch.setattr(Rule, "check", noticed)
    for flags, words in cases:
        given = {"model_path": "tinychat", **flags} if config is ServerConfig else flags
        with pytest.raises(ConfigError) as refusal:
            build(config, given)
        assert words in str(refusal.value), flags
    assert set(triggered) == set(rules(config))


@pytest.mark.parametrize("config", [ServerConfig, RouterConfig])
def test_each_sentence_says_something_of_its_own(config):
    sentences = [rule.sentence for rule in rules(config)]
    assert len(set(sentences)) == len(sentences) and all("--" in sentence for sentence in sentences)


@dataclasses.dataclass(frozen=True)
class Lamp:
    watts: int = 5
    flag_rules = (Rule["Room"](lambda c: c.lamp.watts > c.fuse, "The lamp's {lamp.watts} W exceed {fuse} W."),)
    own_flag_rules = (Rule["Lamp"](lambda c: c.watts < 0, "{watts} W is no power."),)


@dataclasses.dataclass(frozen=True)
class Room:
    lamp: Lamp = Lamp()
    fuse: int = 10


def test_values_stand_in_the_sentence():
    check_rules(Room())
    check_own_rules(Lamp())
    with pytest.raises(ConfigError, match="^The lamp's 20 W exceed 10 W.$"):
        check_rules(Room(Lamp(20)))
    with pytest.raises(ConfigError, match="^-1 W is no power.$"):
        check_own_rules(Lamp(-1))


def test_ranges():
    at_least(Lamp(), 5, "watts")
    with pytest.raises(ConfigError, match="^--watts must be 6 or more, not 5.$"):
        at_least(Lamp(), 6, "watts")


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_value_that_is_no_json_object_is_refused(text):
    assert json_object("--lamp", '{"watts": 5}') == {"watts": 5}
    with pytest.raises(ConfigError, match="^--lamp must be a JSON object"):
        json_object("--lamp", text)
