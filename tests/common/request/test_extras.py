"""Row extras: every field of a request either decides on one, or is known not to change what a step samples or
reports."""

from __future__ import annotations

import dataclasses

from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.request.extras import EXTRAS, RowState, all_extras, row_extras
from baton.common.request.req import Req

PLAIN = {
    # the same for every row: sampling parameters of the kernels, and ends, which the scheduler sees
    "sampling", "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "stop_ids", "stop_token_ids",
    "ignore_eos", "finish",
    # the request's tokens and identity
    "rid", "tokens", "num_prompt_tokens", "namespace", "bootstrap", "arrived", "deadline", "priority", "extras",
    # the scheduler's
    "page_table", "num_cached_tokens", "loaded", "num_computed_tokens", "num_pending", "num_retractions", "swapped_out",
    "drafts", "keeps_pages", "sends_kv", "slo_ttft",
    # an embedding server's, which samples nothing
    "pooling", "embedding",
    # the API server's
    "stop", "stop_regex", "skip_special_tokens", "no_stop_trim",
    # InputBatch.rows_to_check sees them
    "reported", "spans",
}


def test_every_field_of_a_request_has_its_place():
    """Whoever adds a field that changes what is sampled or reported registers an extra for it."""
    fields = {field.name for field in dataclasses.fields(Req)} | set(SamplingParams.__struct_fields__)
    of_extras = [name for extra in all_extras() for name in extra.fields]
    assert len(of_extras) == len(set(of_extras))
    assert not PLAIN & set(of_extras)
    assert fields == PLAIN | set(of_extras)


def request(**fields):
    sampling = SamplingParams(**{name: fields.pop(name) for name in list(fields)
                                 if name in SamplingParams.__struct_fields__})
    return Req.from_message(Generate("1", [5, 6, 7], sampling, **fields), eos_ids=frozenset({1}), now=0.0, timeout=1.0)


def test_extras_of_requests():
    assert request(temperature=0.5, top_p=0.3, seed=4, stop_token_ids=(3,)).extras == ()
    for name, fields in {"penalties": {"presence_penalty": 0.5}, "logit_bias": {"logit_bias": {3: 1.0}},
                         "logprobs": {"return_logprob": True}, "min_new_tokens": {"min_new_tokens": 2},
                         "hidden_states": {"return_hidden_states": True},
                         "routed_experts": {"return_routed_experts": True},
                         "input_embeds": {"input_embeds": bytes(24)}}.items():
        assert request(**fields).extras == (EXTRAS.get(name),)
    both = request(return_logprob=True, logprob_start_len=0, min_new_tokens=2)
    assert set(both.extras) == {EXTRAS.get(name) for name in ("logprobs", "prompt_logprobs", "min_new_tokens")}
    of_row = [extra for extra, _ in row_extras(both, RowState(4))]
    assert of_row == [EXTRAS.get("min_new_tokens"), EXTRAS.get("logprobs")]  # by their order
    assert [extra for extra, _ in row_extras(both, RowState(5))] == [EXTRAS.get("logprobs")]
