"""What is read from a checkpoint's configuration, and what is refused with which sentence."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from baton.common.api.errors import ConfigError
from baton.common.config.checkpoint import resolve_checkpoint
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "eos_token_id": 2,
}


def spec_of(folder: Path, generation: dict | None = None, context_length: int | None = None, **changes):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_spec(ModelArgs(model_path=str(folder), context_length=context_length))


def test_defaults(tmp_path):
    spec = spec_of(tmp_path)
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype, spec.family.rope.rope_theta) == (4, 16, "bfloat16", 10000.0)
    assert spec.family.rope.rope_scaling is None and not spec.tie_word_embeddings and not spec.family.attention_bias
    assert spec.eos_token_ids == (2,) and spec.context_length == 2048


FAMILIES = {
    "Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": {}, "Mixtral": {}, "Qwen2Moe": {}, "Qwen3Moe": {}, "GptOss": {},
    "DeepseekV2": {"num_experts_per_tok": 6}, "DeepseekV3": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_lacks_is_transformers_default(tmp_path, family):
    """A config with next to nothing, and one that lacks each key in turn, read as transformers completes them."""
    kind = getattr(transformers, f"{family}Config")
    named = {"architectures": [f"{family}ForCausalLM"], **FAMILIES[family]}
    full = kind(**FAMILIES[family]).to_dict()
    derived = ("layer_types", "head_dim") if family.startswith("Deepseek") else ("layer_types",)
    small = {"num_hidden_layers": 4, "max_position_embeddings": 8192, "vocab_size": 1000}
    cases = [{}] + [{key: value for key, value in {**full, **small}.items() if key not in (lacking, *derived)}
                    for lacking in full if lacking not in FAMILIES[family]]
    for case in cases:
        case = {**case, **named}
        completed = {**kind(**case).to_dict(), **named, "eos_token_id": kind(**case).eos_token_id}
        read = []
        for i, config in enumerate((case, completed)):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            (tmp_path / str(i) / "config.json").write_text(json.dumps(config))
            read.append(load_model_spec(ModelArgs(model_path=str(tmp_path / str(i)))))
        assert read[0] == dataclasses.replace(read[1], mtp_layers=read[0].mtp_layers), full.keys() - case.keys()


def test_a_missing_key_without_a_default(tmp_path):
    with pytest.raises(ConfigError, match="config.json lacks 'num_experts_per_tok'"):
        spec_of(tmp_path, architectures=["DeepseekV2ForCausalLM"])


def test_ends_of_sequence_by_default_only_without_a_generation_config(tmp_path):
    assert spec_of(tmp_path, eos_token_id=..., vocab_size=...).eos_token_ids == (2,)
    assert spec_of(tmp_path, {}, eos_token_id=...).eos_token_ids == ()


def test_ends_of_sequence_beyond_the_vocabulary_are_dropped(tmp_path):
    spec = spec_of(tmp_path, {"eos_token_id": [5, 100]}, eos_token_id=[-1, 99])
    assert spec.eos_token_ids == (5, 99) and spec.dropped_eos_ids == (100, -1)


def test_eos_tokens_of_both_files_are_joined(tmp_path):
    assert spec_of(tmp_path, {"eos_token_id": [5, 2]}, eos_token_id=[2, 9]).eos_token_ids == (5, 2, 9)
    assert spec_of(tmp_path, {}, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("changes,theta,scaling,context", [
    ({"rope_theta": 5e5}, 5e5, None, 2048),
    ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None, 2048),
    ({"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 9.0,
     {"rope_type": "linear", "factor": 2.0}, 4096),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}, 1e4, {"rope_type": "dynamic", "factor": 3.0}, 6144),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 1e4,
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, 1e4,
     {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 2048}, 2048),
])
def test_rope_in_old_and_new_form(tmp_path, changes, theta, scaling, context):
    spec = spec_of(tmp_path, **changes)
    rope = spec.family.rope
    assert (rope.rope_theta, rope.rope_scaling, spec.context_length) == (theta, scaling, context)


@pytest.mark.parametrize("changes,sentence", [
    ({"architectures": ["NoneForCausalLM"]}, "NoneForCausalLM is not supported: use one of docs/models.md's, or "
                                             "of another model that transformers has"),
    ({"architectures": ...}, "Architecture none is not supported"),
    ({"hidden_act": "gelu"}, "Activation 'gelu' is not supported"),
    ({"quantization_config": {"quant_method": "spqr"}}, "quantized by 'spqr' are not supported"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "Rope scaling 'spiral' is not supported"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "lacks 'rope_scaling.long_factor of longrope'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'rope_scaling.factor of linear'"),
    ({"partial_rotary_factor": 0.5}, "Partial rotary embeddings are not supported"),
    ({"context_length": 2049}, "--context-length 2049 must be between 1 and the model's 2048"),
    ({"sliding_window": 512}, "states sliding_window 512, which models of its architecture do not have"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "states sliding_window 0: it must be 1 or more"),
    ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
     "for each of 2 layers; it has 1: full_attention"),
    ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention", "chunked"]},
     "for each of 2 layers; it has 2: chunked, full_attention"),
])
def test_unsupported_is_refused_with_a_sentence(tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as error:
        spec_of(tmp_path, **changes)
    assert sentence in str(error.value)


@pytest.mark.parametrize("family,changes,windows", [
    ("Mistral", {"sliding_window": 512}, (512, 512, 512, 512)),
    ("Mistral", {"sliding_window": None}, ()),
    ("Mistral", {}, (4096, 4096, 4096, 4096)),  # transformers' default
    ("Mixtral", {}, ()),
    ("Mixtral", {"sliding_window": 512}, (512, 512, 512, 512)),
    ("Qwen2", {"sliding_window": 512}, ()),
    ("Qwen2", {"sliding_window": 512, "use_sliding_window": True}, ()),  # from layer 28 on
    ("Qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 512)),
    ("Qwen3", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 9, "layer_types": [
        "sliding_attention", "full_attention", "full_attention", "sliding_attention"]}, (512, None, None, 512)),
    ("Qwen2Moe", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}, (512, None, None, None)),
    ("Qwen3Moe", {"sliding_window": 512, "use_sliding_window": True}, (512, 512, 512, 512)),
])
def test_sliding_windows_are_transformers_own(tmp_path, family, changes, windows):
    experts = {"Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}.get(family, {})
    spec = spec_of(tmp_path, architectures=[f"{family}ForCausalLM"], num_hidden_layers=4, **experts, **changes)
    assert spec.windows == windows
    stated = {"sliding_window": 512, "num_hidden_layers": 4, "max_position_embeddings": 2048, **changes}
    if "sliding_window" in changes:
        config = getattr(transformers, f"{family}Config")(**stated)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
        theirs = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        assert list(spec.windows_of(range(4))) == theirs


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    stated = {"architectures": ["MistralForCausalLM"], "sliding_window": 512}
    assert spec_of(tmp_path, context_length=512, **stated).windows_of(range(2)) == (None, None)
    assert spec_of(tmp_path, context_length=513, **stated).windows_of(range(1, 2)) == (512,)
    assert spec_of(tmp_path).windows_of(range(2)) == (None, None)


def test_biases_by_family(tmp_path):
    llama = spec_of(tmp_path, attention_bias=True, mlp_bias=True).family
    assert llama.attention_bias and llama.o_bias and llama.mlp_bias
    qwen2 = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"]).family
    assert qwen2.attention_bias and not qwen2.o_bias and not qwen2.qk_norm
    assert spec_of(tmp_path, architectures=["Qwen3ForCausalLM"]).family.qk_norm


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "a/b/c", "with space"])
def test_missing_folder(path):
    with pytest.raises(ConfigError, match="there is no checkpoint folder"):
        resolve_checkpoint(ModelArgs(model_path=path))


def test_unreadable_configuration(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json"):
        load_model_spec(ModelArgs(model_path=str(tmp_path)))
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="config.json"):
            load_model_spec(ModelArgs(model_path=str(tmp_path)))


def test_hub_failure_is_one_sentence(monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"^--model-path org/name: the download .* failed \(no route to host"):
        resolve_checkpoint(ModelArgs(model_path="org/name"))


def test_downloads_go_where_the_flag_says(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, **options: asked.append(options["cache_dir"]) or str(tmp_path))
    for folder in (None, str(tmp_path)):
        assert resolve_checkpoint(ModelArgs(model_path="org/name", download_dir=folder)) == tmp_path
        assert {*asked} == {folder}
        asked.clear()


def test_values_of_the_configuration_are_overridden(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = load_model_spec(ModelArgs(model_path=str(tmp_path)))
    changed = load_model_spec(ModelArgs(model_path=str(tmp_path), json_model_override_args='{"num_hidden_layers": 1}'))
    assert changed.num_layers == 1 < given.num_layers and changed.vocab_size == given.vocab_size
    for text, sentence in (("{", "must be a JSON object: "), ("[1]", "must be a JSON object, not \\[1\\]")):
        with pytest.raises(ConfigError, match="^--json-model-override-args " + sentence):
            ModelArgs(model_path="m", json_model_override_args=text)


def test_the_front_reads_a_specification_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = ("import sys; from baton.common.models.registry import load_model_spec as load; "
            "from baton.common.config.server import ModelArgs; "
            f"load(ModelArgs(model_path={str(tmp_path)!r})); assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
