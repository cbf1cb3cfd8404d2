"""Transformers' own models over Baton's attention and pages: logits of chunks and decode steps, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.distributed.parallel import Parallel
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.layers.mlp import MLP
from baton.common.models.decoder.self_attention import SelfAttention
from baton.common.models.registry import load_model_spec
from baton.common.runner.preflight import fitted
from baton.tests.helpers.fp8_checkpoints import save_float8
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import (
    check_chunks,
    expected_logits,
    forward,
    greedy,
    load_runner,
    scattered_pages,
    server_config,
)
from baton.tests.helpers.thread_ranks import on_ranks

SMALL = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 7,
         "bos_token_id": 1, "pad_token_id": 0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6,
            "original_max_position_embeddings": 32}
FAMILIES = {
    "Llama": {},
    "Nemotron": {},  # partial rotary embeddings
    "Olmo2": {},  # norms after attention and MLP
    "Phi3": {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},  # fused projections
    "Phi": {},  # a head with biases
    "Glm": {"head_dim": 16},  # rotates neighbouring values
    "Granite": {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9},
    "Gemma2": {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "GptOss": {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4},  # sinks
    "Cohere": {"logit_scale": 0.3},
    "Starcoder2": {"sliding_window": 20},
    "Qwen3": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "GPT2": {},
    "GPTNeoX": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4},  # stores stacks of experts
}
SPLIT = ("Llama", "Olmo2", "Phi", "Glm", "Granite", "Gemma3Text", "Starcoder2", "Olmoe")
MULTI_HEAD = ("GPT2", "GPTNeoX")


def save(folder, family: str, **changes):
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if family not in MULTI_HEAD or key != "num_key_value_heads"}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    config._attn_implementation = "eager"
    name = {"Gemma3Text": "Gemma3"}.get(family, family)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in parameter_name else parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def config_of(folder, **changes):
    return server_config(folder, **{"model_impl": "transformers", **changes})


def lengthy_prompts(counts=(73, 59, 65)):
    return [np.random.default_rng(count).integers(0, 131, count) for count in counts]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_eager_attention(tmp_path, family):
    model = save(tmp_path, family, **FAMILIES[family])
    runner = load_runner(config_of(tmp_path))
    check_chunks(runner, model, lengthy_prompts(), 23, 1e-4)
    assert runner._model.supports_cuda_graphs == (family != "GptOss")  # whose experts are not those of our kernels


@pytest.mark.parametrize("family", SPLIT)
def test_ranks_share_the_model_by_its_plan(tmp_path, family):
    changes = FAMILIES[family] | ({"num_key_value_heads": 1} if family == "Granite" else {})
    model = save(tmp_path, family, **changes)

    def rank(tp):
        runner = load_runner(config_of(tmp_path, tp=2), Parallel(tp))
        check_chunks(runner, model, lengthy_prompts((41,)), 23, 1e-4)
        return sum(slot.target.numel() for slot in runner._model.slots())

    held = on_ranks(2, rank)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert max(held) < (0.9 if family in ("Gemma3Text", "Phi") else 0.7) * whole


def test_modules_that_compute_what_ours_do_are_replaced(tmp_path):
    """The speed of Llama by transformers' code depends on it."""
    for family in ("Llama", "Qwen3"):
        save(tmp_path / family, family, **FAMILIES[family])
        model = load_runner(config_of(tmp_path / family))._model
        assert [type(made) for made in model._replaced.made] == [SelfAttention] * 3 + [MLP] * 3
        norms = [module for module in model._model.modules() if type(module).__name__.endswith("RMSNorm")]
        assert len(norms) == 7 and all("forward" in vars(norm) for norm in norms)


def test_an_architecture_that_baton_has_not_is_served_by_itself(tmp_path, caplog):
    save(tmp_path, "Apertus")
    spec = load_model_spec(ModelArgs(str(tmp_path)))
    assert (spec.architecture, spec.implementation, spec.num_kv_heads) == ("ApertusForCausalLM", "transformers", 2)
    with caplog.at_level("INFO"):
        config = fitted(server_config(tmp_path), spec)
    assert config.model.model_impl == "transformers" and "ApertusForCausalLM has no implementation" in caplog.text
    with pytest.raises(ConfigError, match="splits a model over --tp-size alone"):
        fitted(server_config(tmp_path, pp_size=2), spec)
    with pytest.raises(ConfigError, match="ApertusForCausalLM is not supported: use one of"):
        load_model_spec(ModelArgs(str(tmp_path), model_impl="baton"))
    save(tmp_path / "own", "Llama")
    own = server_config(tmp_path / "own")
    assert fitted(own, load_model_spec(own.model)) is own


REFUSED = {
    "DeepseekV3": ({"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 3}, "whose heads are not"),
    "StableLm": ({}, "has no such model whose attention can be replaced"),
    "DiffLlama": ({}, "whose layers attend more than once"),
    "Mamba": ({"state_size": 4}, "lacks 'num_attention_heads'|has no such model"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_need_more_than_causal_attention_are_refused(tmp_path, family):
    changes, sentence = REFUSED[family]
    save(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=sentence):
        load_runner(config_of(tmp_path))


@pytest.mark.parametrize("changes,sentence", [
    ({"architectures": ["NoneForCausalLM"]}, "transformers .* has no such model"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "of type 'dynamic' in some"),
    ({"architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}},
     "give --trust-remote-code to run it"),
    ({"num_kv_shared_layers": 1}, "share keys and values"),
    ({"sliding_window": 16}, "not every layer has causal attention"),
])
def test_what_does_not_fit_is_refused(tmp_path, changes, sentence):
    save(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=sentence):
        load_runner(config_of(tmp_path))


def test_models_without_a_plan_are_not_split(tmp_path):
    save(tmp_path, "Nemotron")
    with pytest.raises(ConfigError, match="has no plan for tensor parallelism: leave --tp-size out"):
        on_ranks(2, lambda tp: load_runner(config_of(tmp_path, tp=2), Parallel(tp)))


def test_float8_weights_are_those_of_batons_own_implementation(tmp_path):
    save(tmp_path, "Llama", hidden_size=64, intermediate_size=96)
    prompt, logits = lengthy_prompts((30,))[0], []
    for implementation in ("baton", "transformers"):
        runner = load_runner(config_of(tmp_path, model_impl=implementation, quantization="fp8"))
        logits.append(forward(runner, [(prompt, 0, scattered_pages(runner, 1, 30)[0])]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form,ranks", [("blocks", 1), ("channel", 2)])
def test_quantized_checkpoints_are_those_of_batons_own_implementation(tmp_path, form, ranks):
    save_float8(tmp_path, form, "Qwen3")
    prompt = lengthy_prompts((30,))[0] % 97

    def logits(implementation):
        def rank(tp):
            runner = load_runner(config_of(tmp_path, model_impl=implementation, tp=ranks), Parallel(tp))
            return forward(runner, [(prompt, 0, scattered_pages(runner, 1, 30)[0])])

        return on_ranks(ranks, rank)[0]

    torch.testing.assert_close(logits("transformers"), logits("baton"), atol=1e-4, rtol=0)


def test_experts_are_not_quantized(tmp_path):
    save(tmp_path, "Olmoe", **FAMILIES["Olmoe"])
    with pytest.raises(ConfigError, match="does not quantize experts"):
        load_runner(config_of(tmp_path, quantization="fp8"))


def test_dynamic_rotary_embeddings_are_those_of_the_configured_length(tmp_path):
    model = save(tmp_path, "Granite", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                 max_position_embeddings=64)
    prompt = lengthy_prompts((100,))[0]
    runner = load_runner(config_of(tmp_path, context_length=100))
    pages = scattered_pages(runner, 1, 100)[0]
    got = torch.cat([forward(runner, [(prompt[start:start + 50], start, pages)]) for start in (0, 50)])
    torch.testing.assert_close(got, expected_logits(model, prompt), atol=1e-4, rtol=0)


def test_code_of_a_checkpoint_runs_where_it_is_trusted(tmp_path):
    model = save(tmp_path, "Granite")
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import GraniteConfig, GraniteForCausalLM\n"
        "class OwnConfig(GraniteConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(GraniteForCausalLM):\n    config_class = OwnConfig\n")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({
        **config, "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}))
    runner = load_runner(config_of(tmp_path, model_impl="auto", trust_remote_code=True))
    check_chunks(runner, model, lengthy_prompts((30,)), 23, 1e-4)


def test_classifiers_score_hidden_states(tmp_path):
    torch.manual_seed(0)
    config = transformers.GlmConfig(**SMALL, head_dim=12, num_labels=3)
    model = transformers.GlmForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    runner = load_runner(config_of(tmp_path, is_embedding=True))
    tokens = lengthy_prompts((40,))[0]
    pages = scattered_pages(runner, 1, 40)[0]
    batch = build_forward_batch([Row(tokens, 0, pages)], runner.layout.page_size, runner.device, [39])
    with torch.inference_mode():
        want = model(torch.from_numpy(tokens)[None]).logits
    torch.testing.assert_close(runner.classify(runner.hidden_states(batch)), want, atol=1e-4, rtol=0)


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
