"""Every field that SGLang's request models know is read, refused, or told to have no effect: none is dropped silently.

The lists are those of SGLang's OpenAI protocol, ``GenerateReqInput``, ``EmbeddingReqInput`` and ``SamplingParams`` as
of 2026, and what its documents of 0.4 and 0.5 name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import baton.common
from baton.common.api.errors import InvalidRequest
from baton.common.serving.chat import schema as chat
from baton.common.serving.completions import schema as completions
from baton.common.serving.embeddings import schema as embeddings
from baton.common.serving.native import schema as native
from baton.common.serving.protocol import unsupported_fields
from baton.common.serving.protocol.unsupported_fields import NO_EFFECT, asks_nothing
from baton.common.serving.responses import schema as responses

_OPENAI = """model frequency_penalty logit_bias logprobs n presence_penalty seed stop stream stream_options temperature
top_p user return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
ignore_eos skip_special_tokens lora_path session_id session_params response_format custom_params
custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id
priority max_tokens"""
CHAT = _OPENAI + """ messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls
return_prompt_token_ids return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning
stream_reasoning
chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids functions function_call
chat_template modalities audio prediction store metadata service_tier verbosity web_search_options
prompt_cache_key safety_identifier"""
COMPLETION = _OPENAI + " prompt best_of echo suffix json_schema custom_labels"
RESPONSE = """background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
previous_response_id reasoning service_tier store stream temperature text tool_choice tools top_logprobs top_p
truncation user request_id priority frequency_penalty presence_penalty stop stop_regex stop_token_ids top_k
min_p repetition_penalty conversation prompt extra_key cache_salt ignore_eos min_tokens seed n lora_path"""
GENERATE = """rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
use_audio_in_video video_config sampling_params return_logprob logprob_start_len top_logprobs_num
token_ids_logprob return_sampling_mask return_text_in_logprobs return_flat_raw_top_logprobs
return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts
routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id custom_logit_processor
positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size
routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint routing_key conversation_id
http_worker_ipc background require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels
return_bytes return_entropy return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs
num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
video_max_dynamic_patch images_config multi_item_delimiter_indices cache_salt label"""
SAMPLING = """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos
skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed
beam_width"""
ENCODE = """text image_data video_data audio_data input_ids rid priority is_cross_encoder_request lora_path lora_id
embed_overrides embed_override_token_id input_embeds log_metrics routing_key"""
EMBEDDING = "input model encoding_format dimensions user rid priority lora_path embed_override_token_id embed_overrides"
SCORE = """query items label_token_ids apply_softmax item_first model embed_override_token_id query_embed_overrides
item_embed_overrides return_pooled_hidden_states"""
RERANK = "query documents instruct top_n return_documents model"
MODELS: dict[str, tuple[str, type[msgspec.Struct], unsupported_fields.Table]] = {
    "chat": (CHAT, chat.ChatRequest, unsupported_fields.CHAT),
    "completion": (COMPLETION, completions.CompletionRequest, unsupported_fields.COMPLETION),
    "response": (RESPONSE, responses.ResponseRequest, unsupported_fields.RESPONSE),
    "generate": (GENERATE, native.GenerateRequest, unsupported_fields.GENERATE),
    "sampling": (SAMPLING, native.NativeSampling, unsupported_fields.SAMPLING),
    "encode": (ENCODE, embeddings.EncodeRequest, unsupported_fields.EMBEDDING),
    "embedding": (EMBEDDING, embeddings.EmbeddingRequest, unsupported_fields.EMBEDDING),
    "score": (SCORE, embeddings.ScoreRequest, unsupported_fields.EMBEDDING),
    "rerank": (RERANK, embeddings.RerankRequest, unsupported_fields.EMBEDDING),
}
SOURCES = "\n".join(path.read_text() for folder in ("parsers", "serving")
                    for path in sorted((Path(baton.common.__file__).parent / folder).rglob("*.py"))
                    if path.name != "unsupported_fields.py")
DECODERS = {
    "chat": (chat.decode_chat, {"messages": []}), "completion": (completions.decode_completion, {"prompt": "x"}),
    "response": (responses.decode_response, {"input": "x"}), "generate": (native.decode_generate, {"text": "x"}),
    "encode": (embeddings.decode_encode, {"text": "x"}), "embedding": (embeddings.decode_embedding, {"input": "x"}),
    "score": (embeddings.decode_score, {"query": "x", "items": ["y"], "label_token_ids": [1]}),
    "rerank": (embeddings.decode_rerank, {"query": "x", "documents": ["y"]}),
}


@pytest.mark.parametrize("model", MODELS)
def test_no_field_is_dropped(model: str) -> None:
    names, kind, table = MODELS[model]
    for name in names.split():
        read = name in kind.__struct_fields__ and name not in table
        assert read or name in table or name in NO_EFFECT, f"{name} of {model} is dropped silently"
        if read and name not in NO_EFFECT:
            assert re.search(rf'\.{name}\b|"{name}"', SOURCES), f"{name} of {model} is decoded and never read"


@pytest.mark.parametrize("model", DECODERS)
def test_refused_fields(model: str) -> None:
    """Each is refused by its name where it asks for something, and taken where it does not."""
    decode, body = DECODERS[model]
    _, kind, table = MODELS[model]
    assert not table.keys() & set(kind.__struct_fields__), "a field is both read and refused"
    for name, rule in table.items():
        for nothing in (None, False, "", [], [None], {}, [[None], []], *rule.harmless):
            decode(json.dumps({**body, name: nothing}).encode())
        for something in (True, 3, "x", ["x"], [None, {"url": "x"}], {"a": 1}):
            if not asks_nothing(something, rule.harmless):
                with pytest.raises(InvalidRequest, match=f"{name} is not supported here; .*\\.$") as error:
                    decode(json.dumps({**body, name: something}).encode())
                assert error.value.param == name and error.value.code == "unsupported_parameter"


@pytest.mark.parametrize("params, param", [
    ({"beam_width": 4}, "beam_width"), ({"stream_interval": 3}, "stream_interval"), ({"stop_regex": "("}, "stop_regex"),
    ({"stop_regex": ["x"] * 9}, "stop_regex")])
def test_refused_sampling_params(params: dict[str, Any], param: str) -> None:
    body = native.decode_generate(json.dumps({"text": "x", "sampling_params": params}).encode())
    with pytest.raises(InvalidRequest) as error:
        body.samplings(1)[0].params(16, 100)
    assert error.value.param == param


def test_harmless_sampling_params() -> None:
    body = native.decode_generate(b'{"text": "x", "lora_path": [null], "sampling_params": {"beam_width": 1, '
                                  b'"stream_interval": null, "spaces_between_special_tokens": false}}')
    assert body.samplings(1)[0].params(16, 100).max_new_tokens == 16
