"""Request fields of other servers that this one does not support: refused where they ask for something.

A request whose field is dropped silently is answered wrongly. Each field of SGLang's request models is either read,
refused by the tables here, or listed in NO_EFFECT with the reason why its absence changes no answer
(tests/common/serving/test_request_fields.py walks through all of them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from ...api.errors import InvalidRequest


@dataclass(frozen=True)
class Refused:
    """``harmless``: values that ask for nothing, besides null, false, and empty ones. ``instead``: the alternative."""

    instead: str = "leave it out"
    harmless: tuple[Any, ...] = ()


Table = Mapping[str, Refused]

_PLAIN = Refused()
_TEXT_ONLY = Refused("this model takes text only")
_NO_LORA = Refused("this server has no adapters")
_SALT = Refused("these requests share one prefix cache; start the server with --disable-radix-cache to share nothing")
_MEDIA = dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "images_config"), _TEXT_ONLY)
_CACHE = {"extra_key": _SALT, "cache_salt": _SALT}
_IN_GENERATE = Refused("/generate takes it")
_ROUTED = {"return_routed_experts": _IN_GENERATE, "routed_experts_start_len": Refused("/generate takes it", (0,))}
_IN_CHAT = Refused("/v1/chat/completions and /generate take it")
_SEND = "send {} instead".format
_CHAT_ONLY = Refused("/v1/chat/completions takes it")
_SAMPLED = {
    "return_sampling_mask": _PLAIN,
    "sampling_logprobs_mode": Refused("start the server with --return-original-logprob"),
    "return_flat_raw_output_top_logprobs": Refused("top log-probabilities come in lists"),
    "return_flat_raw_top_logprobs_b64": Refused("top log-probabilities come in lists"),
}

_OPENAI: Table = {
    **_MEDIA, **_ROUTED,
    "lora_path": _NO_LORA,
    "prompt_logprobs": Refused("/v1/completions returns log-probabilities of the prompt with echo and logprobs, "
                               "/generate with logprob_start_len"),
    "return_meta_info": Refused("/generate returns it"),
    "return_spec_tokens_details": Refused("/generate has them in meta_info"), "watermark": _PLAIN,
    "ngram_corpus_id": _PLAIN,
    # vLLM's
    "guided_json": Refused(_SEND("json_schema")), "guided_regex": Refused(_SEND("regex")),
    "guided_grammar": Refused(_SEND("ebnf")), "guided_choice": Refused(_SEND("regex")),
    "structured_outputs": Refused(_SEND("json_schema, regex, ebnf or structural_tag")),
    "include_stop_str_in_output": Refused(_SEND("no_stop_trim")),
    "use_beam_search": _PLAIN, "length_penalty": Refused(harmless=(1,)), "bad_words": _PLAIN,
    "allowed_token_ids": Refused(_SEND("logit_bias or a grammar")), "truncate_prompt_tokens": _PLAIN,
    "logits_processors": _PLAIN, "mm_processor_kwargs": _TEXT_ONLY,
}

CHAT: Table = {
    **_OPENAI,
    "functions": Refused(_SEND("tools")), "function_call": Refused(_SEND("tool_choice"), ("auto", "none")),
    "input_ids": Refused("/generate takes them"), "task": _PLAIN, "documents": Refused("put them into messages"),
    "echo": Refused("/v1/completions takes it"), "best_of": Refused("/v1/completions takes it", (1,)),
    "modalities": Refused("this model writes text only", (["text"],)), "audio": _TEXT_ONLY,
    "web_search_options": Refused("this server runs no tools"), "video_config": _TEXT_ONLY,
    **_SAMPLED, "moderation": _PLAIN,
}
COMPLETION: Table = {**_OPENAI, "return_prompt_token_ids": Refused(_SEND("return_token_ids"))}
RESPONSE: Table = {
    **{name: refused for name, refused in _OPENAI.items() if name != "truncation"},
    "conversation": Refused(_SEND("previous_response_id")), "prompt": _PLAIN,
    "truncation": Refused(harmless=("disabled",)),
    "custom_logit_processor": _IN_CHAT, "custom_params": _IN_CHAT,
    "return_hidden_states": Refused("/v1/chat/completions and /generate return them"),
    "n": Refused("an answer is one response", (1,)), "input_ids": Refused("/generate takes them"),
    "return_token_ids": Refused("/v1/chat/completions returns them"), "return_cached_tokens_details": _IN_CHAT,
    "return_prompt_token_ids": Refused("/v1/chat/completions returns them"),
    "background_options": _PLAIN, "context_management": _PLAIN, "image": _TEXT_ONLY, "moderation": _PLAIN,
    "access_programs": _PLAIN,
}
_WITH_MEDIA = dict.fromkeys(("image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes",
                             "video_config", "image_max_dynamic_patch", "video_max_dynamic_patch"), _TEXT_ONLY)
GENERATE: Table = {
    **_MEDIA, **_WITH_MEDIA, **_SAMPLED,
    "lora_path": _NO_LORA, "lora_id": _NO_LORA, "background": _PLAIN, "watermark": _PLAIN,
    "return_flat_raw_top_logprobs": Refused("top_logprobs_num returns them in lists"),
    "return_indexer_topk": _PLAIN, "mm_processor_kwargs": _TEXT_ONLY,
    "positional_embed_overrides": Refused(_SEND("input_embeds")), "require_reasoning": _PLAIN,
    "max_thinking_tokens": _PLAIN, "no_logs": Refused("start the server without --log-requests"),
    "return_entropy": _PLAIN,
    "multi_item_delimiter_indices": Refused("/v1/score takes items"),
}
_OVERRIDES = dict.fromkeys(("embed_overrides", "embed_override_token_id", "positional_embed_overrides",
                            "query_embed_overrides", "item_embed_overrides"), _PLAIN)
EMBEDDING: Table = {
    **_WITH_MEDIA, **_OVERRIDES, **_CACHE, "lora_path": _NO_LORA, "lora_id": _NO_LORA,
    "return_pooled_hidden_states": _PLAIN, "input_embeds": Refused("/generate takes them"),
    "return_prompt_token_ids": Refused("/tokenize returns them"), "decision_layout": _PLAIN, "background": _PLAIN,
    "is_cross_encoder_request": Refused("/v1/rerank takes pairs"),
    "multi_item_delimiter_indices": Refused("/v1/score takes items"),
}
ENCODE: Table = {**EMBEDDING, "dimensions": Refused("/v1/embeddings takes it")}
SCORE: Table = {**EMBEDDING, "score_extraction_token": _PLAIN}
_ANTHROPIC: Table = {  # of Anthropic's own servers
    "container": _PLAIN, "context_management": _PLAIN, "mcp_servers": Refused("this server runs no tools"),
    "compaction": _PLAIN, "thread": _PLAIN,
}
ANTHROPIC: Table = {
    **_ANTHROPIC, "repetition_penalty": _CHAT_ONLY, "frequency_penalty": _CHAT_ONLY, "presence_penalty": _CHAT_ONLY,
    "min_p": _CHAT_ONLY, "seed": _CHAT_ONLY, "logit_bias": _CHAT_ONLY, "stop": Refused(_SEND("stop_sequences")),
    "n": Refused("an answer is one message", (1,)), "lora_path": _NO_LORA,
}
SAMPLING: Table = {
    "beam_width": Refused(harmless=(1,)),
    "watermark": _PLAIN,
}
TOOL: Table = {"defer_loading": Refused("send the tool when it is needed")}
MESSAGE: Table = {
    "phase": _PLAIN,
    "function_call": Refused(_SEND("tool_calls")), "tools": Refused("send tools next to messages"), "audio": _TEXT_ONLY,
}

_TRACKING = "names the request for logs, metrics or billing of whoever sends it"
_HINT = "a hint to routers or caches, which changes no token"
_INTERNAL = "passed between processes of SGLang"
_VENDOR = "about the vendor's own service: where, how fast and for whom it computes"
NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("user", "session_id", "metadata", "store", "service_tier", "safety_identifier", "custom_labels",
                     "conversation_id", "log_metrics", "request_id", "label"), _TRACKING),
    **dict.fromkeys(("prompt_cache_key", "prediction", "routing_key", "kv_router_hint", "bootstrap_pair_key",
                     "decode_tp_size", "verbosity", "kv_hints", "cache_control", "prompt_cache_options",
                     "prompt_cache_retention"), _HINT),
    **dict.fromkeys(("task_budget", "budget_tokens"), "a target, as Anthropic calls it, and no limit"),
    **dict.fromkeys(("http_worker_ipc", "external_trace_header", "received_time", "return_bytes",
                     "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "is_single",
                     "token_indices_to_pool", "stop_strs", "stop_regex_strs", "stop_str_max_len",
                     "stop_regex_max_len", "is_normalized", "ebnf_full_assistant", "key_order"), _INTERNAL),
    **dict.fromkeys(("betas", "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo",
                     "speed", "user_profile_id", "workspace_id"), _VENDOR),
    "modalities": "describes image_data, which is refused",
    "stream_options": "streams of responses end with their usage and hold no padding that hides lengths",
    "sampling_params": "vectors are not sampled",
    "spaces_between_special_tokens":
        "fast tokenizers, the only ones that are used here, put no spaces",
}
"""Fields that are accepted and ignored, each with the reason."""


class UnsupportedFields:
    """The fields of one table, decoded together with those of a request type: a second pass over a body of 8 MB would
    take 4 ms."""

    def __init__(self, table: Table):
        self._table = table
        self._values = attrgetter(*table)
        self._nothing = (None,) * len(table)

    def added_to(self, kind: type[Any]) -> type[Any]:
        """The type with these fields added to its own."""
        fields = [(name, Any, None) for name in self._table]
        return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)

    def check(self, request: Any) -> None:
        """Raises InvalidRequest; ``request`` is of such a type."""
        values = self._values(request)
        if values != self._nothing:
            for name, value in zip(self._table, values):
                refuse(self._table, name, value)


def refuse(table: Table, name: str, value: Any) -> None:
    """Raises InvalidRequest where the field's value asks for something."""
    refused = table[name]
    if asks_nothing(value, refused.harmless):
        return
    raise InvalidRequest(f"{name} is not supported here; {refused.instead}.", param=name, code="unsupported_parameter")


def asks_nothing(value: Any, harmless: tuple[Any, ...] = ()) -> bool:
    """True for a value that is null, false or empty, or a list of such values."""
    if value is None or value is False or value in ("", [], {}) or any(value == one for one in harmless):
        return True
    return isinstance(value, list) and all(asks_nothing(item) for item in value)
