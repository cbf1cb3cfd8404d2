"""Transformers' own models over Baton's attention and pages: logits of chunks and decode steps, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.models.registry import load_model_spec
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import check_chunks, greedy, load_runner, scattered_pages, server_config

SMALL = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 7,
         "bos_token_id": 1, "pad_token_id": 0}
FAMILIES = {
    "Llama": {},
    "Nemotron": {},  # partial rotary embeddings
    "Olmo2": {},  # norms after attention and MLP
    "Phi3": {},  # fused projections
    "Glm": {"head_dim": 16},  # rotates neighbouring values
    "Granite": {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9},
    "Cohere": {"logit_scale": 0.3},
    "Starcoder2": {"sliding_window": 20},
    "Qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
}


def save(folder, family: str, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    name = {"Gemma3Text": "Gemma3"}.get(family, family)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in parameter_name else parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def config_of(folder):
    return server_config(folder, model_impl="transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_eager_attention(tmp_path, family):
    model = save(tmp_path, family, **FAMILIES[family])
    prompts = [np.random.default_rng(count).integers(0, 131, count) for count in (73, 29, 65)]
    check_chunks(load_runner(config_of(tmp_path)), model, prompts, 23, 1e-4)


def test_an_architecture_that_baton_has_not_is_read_and_served(tmp_path):
    save(tmp_path, "Arcee")
    with pytest.raises(ConfigError, match="ArceeForCausalLM is not supported: use a checkpoint of"):
        load_model_spec(ModelArgs(str(tmp_path)))
    spec = load_model_spec(ModelArgs(str(tmp_path), model_impl="transformers"))
    assert (spec.architecture, spec.implementation, spec.num_kv_heads) == ("ArceeForCausalLM", "transformers", 2)


REFUSED = {
    "Gemma2": ({"head_dim": 16}, "its attention has softcap"),
    "DeepseekV3": ({"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 3}, "whose heads are not"),
    "StableLm": ({}, "has no such model whose attention can be replaced"),
    "Mamba": ({"state_size": 4}, "lacks 'num_attention_heads'|has no such model"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_need_more_than_causal_attention_are_refused(tmp_path, family):
    changes, sentence = REFUSED[family]
    save(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=sentence):
        load_runner(config_of(tmp_path))


@pytest.mark.parametrize("changes,sentence", [
    ({"architectures": ["LlamaForSequenceClassification"]}, "serves causal language models"),
    ({"architectures": ["NoneForCausalLM"]}, "transformers .* has no such model"),
    ({"quantization_config": {"quant_method": "fp8"}}, "does not read quantized checkpoints"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embeddings of type 'dynamic'"),
    ({"num_kv_shared_layers": 1}, "share keys and values"),
    ({"sliding_window": 16}, "not every layer has causal attention"),
])
def test_what_does_not_fit_is_refused(tmp_path, changes, sentence):
    save(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=sentence):
        load_runner(config_of(tmp_path))


@pytest.mark.parametrize("field,args,sentence", [
    ("parallel", {"tp_size": 2}, "computes on one rank"),
    ("answers", {"enable_return_hidden_states": True}, "returns no hidden states"),
    ("model", {"quantization": "fp8"}, "does not quantize"),
])
def test_flags_that_do_not_combine_are_refused(tmp_path, field, args, sentence):
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(config, **{field: dataclasses.replace(getattr(config, field), **args)})


def test_tokens_of_the_unified_engine_are_transformers_own(tmp_path):
    """Over chunks, a prefix cache and decode steps of several requests."""
    model = save(tmp_path, "Granite", **FAMILIES["Granite"])
    engine = Engine(tmp_path, page_size=4, chunk=16, model_impl="transformers")
    prompts = [[(7 * i + count) % 97 for i in range(count)] for count in (3, 20, 41, 20)]
    for rid, prompt in enumerate(prompts):
        engine.start(str(rid), prompt, max_new_tokens=8)
    found = tokens_of(engine.run())
    assert [found[str(rid)] for rid in range(4)] == [greedy(model, prompt, 8) for prompt in prompts]


def test_embeddings_are_transformers_hidden_states(tmp_path):
    model = save(tmp_path, "Olmo2")
    runner = load_runner(server_config(tmp_path, model_impl="transformers", is_embedding=True))
    tokens = np.random.default_rng(0).integers(0, 131, 40)
    pages = scattered_pages(runner, 1, 40)[0]
    rows = [Row(tokens, 0, pages)]
    got = runner.hidden_states(build_forward_batch(rows, runner.layout.page_size, runner.device, [3, 39]))
    with torch.inference_mode():
        want = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
    torch.testing.assert_close(got, want[[3, 39]], atol=1e-4, rtol=0)
