"""Paths that are relayed, broadcast and collected: which, with which methods."""

from __future__ import annotations

_POST, _GET = (b"POST",), (b"GET", b"HEAD")

PAIR_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/generate"))
"""In a cluster of pairs these need one; all others one worker of either role. Streams of our servers name their tokens,
so that another worker can go on with them."""

RELAYED: dict[bytes, tuple[bytes, ...]] = {
    **dict.fromkeys(PAIR_PATHS, _POST),
    **dict.fromkeys((b"/encode", b"/classify", b"/score", b"/rerank", b"/pooling", b"/tokenize", b"/detokenize",
                     b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/v1/classify",
                     b"/v1/tokenize", b"/v1/detokenize",
                     b"/open_session", b"/close_session", b"/separate_reasoning", b"/parse_function_call",
                     b"/vertex_generate"), _POST),
    **dict.fromkeys((b"/v1/models", b"/get_model_info", b"/model_info", b"/get_server_info", b"/server_info",
                     b"/health_generate", b"/openapi.json"), _GET),
}
"""Relayed to one worker. Under ``PREFIXES`` all else is relayed too, so that a worker may offer more."""

PREFIXES = (b"/v1/", b"/v2/", b"/api/", b"/inference/")
ANY_METHOD = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE")

ELSEWHERE: dict[bytes, str] = {
    b"/parse/function_call": "use /parse_function_call, which the workers answer",
    b"/parse/reasoning": "use /separate_reasoning, which the workers answer",
    b"/wasm": "this router runs no plug-ins",
    b"/ha/": "processes of one router share their state by --router-workers; several routers need none in common",
}
"""Paths of sglang-router that are not served here, and what to do instead."""

QUICK_BROADCASTS = (b"/flush_cache", b"/abort_request", b"/start_profile", b"/stop_profile", b"/pause_generation",
                    b"/continue_generation", b"/configure_logging", b"/set_internal_state", b"/reset_prefix_cache",
                    b"/start_expert_distribution_record", b"/stop_expert_distribution_record",
                    b"/dump_expert_distribution_record")
SLOW_BROADCASTS = (
    b"/update_weights_from_disk", b"/update_weights_from_tensor", b"/update_weights_from_distributed",
    b"/update_weights_from_ipc", b"/init_weights_update_group", b"/destroy_weights_update_group",
    b"/update_weight_version", b"/release_memory_occupation", b"/resume_memory_occupation",
    b"/load_lora_adapter", b"/unload_lora_adapter", b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
"""Sent to every worker; the slow ones move weights and may take minutes."""
RENAMING = frozenset((b"/update_weights_from_disk", b"/load_lora_adapter", b"/unload_lora_adapter",
                      b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"))
"""After these the workers may serve other models."""


LABELS = {path: path.decode() for path in RELAYED}
"""Of the paths that most requests have."""


def label(path: bytes, own: frozenset[bytes]) -> str:
    """A path as a metric's label; the label set stays small whatever clients ask for."""
    if path in LABELS or path in own:
        return path.decode()
    for prefix in PREFIXES:
        if path.startswith(prefix):
            return prefix.decode() + "*"
    return "other"
