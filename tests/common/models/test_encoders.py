"""Encoders against transformers: hidden states of sequences of several lengths in a step, heads, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from baton.common.api.errors import ConfigError
from baton.common.config.checkpoint import resolve_pooling
from baton.common.config.server import ModelArgs
from baton.common.distributed.parallel import Parallel
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.models.registry import load_model_spec
from baton.common.runner.preflight import fitted
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config
from baton.tests.helpers.thread_ranks import on_ranks

SMALL = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 66}
SEPARATOR = 9
KINDS = {"Bert": {}, "Roberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"}, "XLMRoberta": {"type_vocab_size": 1},
         "Camembert": {"type_vocab_size": 1}}


def save(folder, kind: str, head: str = "Model", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "LayerNorm.weight" in name else parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": SEPARATOR, "content": "[SEP]"}]}))
    return model


def sequences(counts=(3, 40, 17, 1)):
    """With a separator in the middle of each and at its end, as pairs have them."""
    made = [np.random.default_rng(count).integers(10, 131, count) for count in counts]
    for tokens in made:
        tokens[[len(tokens) // 2, -1]] = SEPARATOR
    return made


def reference(model, tokens, **types):
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)[None], **types)


def types_of(tokens):
    first = int(np.argmax(tokens == SEPARATOR))
    return torch.from_numpy((np.arange(len(tokens)) > first).astype(np.int64))[None]


def states_of(runner, prompts):
    pages = scattered_pages(runner, len(prompts), 48)
    rows = [Row(tokens, 0, page_ids) for tokens, page_ids in zip(prompts, pages)]
    total = sum(map(len, prompts))
    return runner.hidden_states(build_forward_batch(rows, runner.layout.page_size, runner.device, list(range(total))))


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_sequences_are_those_of_transformers(tmp_path, kind):
    model, prompts = save(tmp_path, kind, **KINDS[kind]), sequences()
    options = [{"token_type_ids": types_of(tokens)} if kind == "Bert" else {} for tokens in prompts]
    want = torch.cat([reference(model, tokens, **types).last_hidden_state[0]
                      for tokens, types in zip(prompts, options)])
    torch.testing.assert_close(states_of(load_runner(server_config(tmp_path)), prompts), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Bert", "XLMRoberta"])
def test_classifiers_and_ranks(tmp_path, kind):
    model = save(tmp_path, kind, "ForSequenceClassification", **KINDS[kind], num_labels=3)
    [tokens] = prompts = sequences((40,))
    types = {"token_type_ids": types_of(tokens)} if kind == "Bert" else {}
    want = reference(model, tokens, **types).logits

    def scores(tp):
        runner = load_runner(server_config(tmp_path, tp=2), Parallel(tp))
        return runner.classify(states_of(runner, prompts)[:1])

    for got in on_ranks(2, scores):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_names_of_old_checkpoints_and_of_whole_models(tmp_path):
    model, prompts = save(tmp_path, "Bert"), sequences((20,))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {"cls.predictions.bias": torch.zeros(131)}
    for name, tensor in model.state_dict().items():
        ending = next((ending for ending in old if name.endswith(ending)), "")
        tensors[f"bert.{name.removesuffix(ending)}{old.get(ending, '')}"] = tensor.clone()
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    want = reference(model, prompts[0], token_type_ids=types_of(prompts[0])).last_hidden_state[0]
    torch.testing.assert_close(states_of(load_runner(server_config(tmp_path)), prompts), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_decoders_that_attend_in_both_directions(tmp_path, family):
    """As gte-Qwen2; with rotary embeddings, normed heads and shared KV heads."""
    model = save_model(tmp_path, family, is_causal=False).model
    spec, prompts = load_model_spec(ModelArgs(str(tmp_path))), sequences()
    assert (spec.encoder, spec.pooling) == (True, "last")
    causal = save_model(tmp_path / "causal", family).model
    want, other = (torch.cat([reference(each, tokens).last_hidden_state[0] for tokens in prompts])
                   for each in (model, causal))
    assert (want - other).abs().max() > 0.01
    torch.testing.assert_close(states_of(load_runner(server_config(tmp_path)), prompts), want, atol=1e-4, rtol=0)


def test_windows_in_both_directions_are_refused(tmp_path):
    save_model(tmp_path, "Mistral", is_causal=False, sliding_window=16)
    with pytest.raises(ConfigError, match="attends in both directions by its config.json"):
        load_model_spec(ModelArgs(str(tmp_path)))


def test_encoders_are_served_as_embedding_servers(tmp_path):
    save(tmp_path, "Roberta", **KINDS["Roberta"])
    spec = load_model_spec(ModelArgs(str(tmp_path)))
    assert (spec.encoder, spec.head, spec.context_length, spec.num_kv_layers) == (True, "none", 64, 1)
    assert spec.pooling == "cls"
    config = fitted(server_config(tmp_path), spec)
    assert config.model.is_embedding and config.cache.disable_radix_cache
    assert config.schedule.chunked_prefill_size == -1 and config.kernels.attention_backend == "torch"
    with pytest.raises(ConfigError, match="--is-embedding needs a unified server"):
        fitted(server_config(tmp_path, disaggregation_mode="prefill"), spec)
    with pytest.raises(ConfigError, match="attends in both directions, and --tp-size alone splits it"):
        fitted(server_config(tmp_path, tp_size=2, dp_size=2, enable_dp_attention=True), spec)
    with pytest.raises(ConfigError, match="computes sequences whole: --max-prefill-tokens 32 must be its 64"):
        fitted(server_config(tmp_path, max_prefill_tokens=32), spec)


@pytest.mark.parametrize("changes,sentence", [
    ({"position_embedding_type": "relative_key"}, "with position embeddings of type 'relative_key' is not supported"),
    ({"is_decoder": True}, "as a decoder is not supported"),
])
def test_other_encoders_are_refused(tmp_path, changes, sentence):
    save(tmp_path, "Bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=sentence):
        load_model_spec(ModelArgs(str(tmp_path)))


def test_separators_of_vocabularies(tmp_path):
    save(tmp_path, "Bert")
    assert load_model_spec(ModelArgs(str(tmp_path))).family.separator_id == SEPARATOR
    (tmp_path / "tokenizer.json").unlink()
    assert load_model_spec(ModelArgs(str(tmp_path))).family.separator_id is None
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\nword\n")
    assert load_model_spec(ModelArgs(str(tmp_path))).family.separator_id == 2


def test_pooling_is_that_of_sentence_transformers_files(tmp_path):
    def pooling(default="cls", **flags):
        return resolve_pooling(ModelArgs(str(tmp_path), **flags), default)

    def state(**modes):
        (tmp_path / "2_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))

    assert pooling() == "cls" and pooling("last") == "last" and pooling(pooling="mean") == "mean"
    (tmp_path / "modules.json").write_text(json.dumps([
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "2_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}]))
    (tmp_path / "2_Pooling").mkdir()
    for key, name in {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}.items():
        state(**{"pooling_mode_max_tokens": False, f"pooling_mode_{key}": True})
        assert pooling() == name
    state(pooling_mode_max_tokens=True)
    with pytest.raises(ConfigError, match=r"pooling \(pooling_mode_max_tokens\) is not supported: give --pooling"):
        pooling()
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([dense]))
    with pytest.raises(ConfigError, match="names the module Dense, which is not supported"):
        pooling()
    (tmp_path / "modules.json").write_text("{}x")
    with pytest.raises(ConfigError, match="Cannot read .*modules.json"):
        pooling()
