"""Checkpoints in other files than Hugging Face's safetensors: Mistral's own, numpy's copies; quantized as they are
read."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.weights.fingerprint import identify
from baton.common.weights.plain_reads import ReadTensor
from baton.common.weights.source import open_weights
from baton.tests.helpers.small_models import expected_logits, load_runner, logits_of, save_model, server_config
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.arange(1, 12)
MISTRAL = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj":
           "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj":
           "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj":
           "feed_forward.w3", "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
           "block_sparse_moe.": "", "mlp.": "", "model.layers": "layers"}


def as_mistral(folder, **params) -> None:
    """Rewrites a checkpoint of transformers in Mistral's own format."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 2, head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        for theirs, own in MISTRAL.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).unlink()
    (folder / "params.json").write_text(json.dumps({
        "dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "hidden_dim": 88, "vocab_size": 131,
        "norm_eps": config["rms_norm_eps"], "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_seq_len": 256, **params}))


def test_mistrals_own_format(tmp_path):
    model = save_model(tmp_path, "Mistral")
    as_mistral(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path, TOKENS), expected_logits(model, TOKENS), atol=1e-4, rtol=0)
    args = ModelArgs(str(tmp_path))
    assert load_model_spec(args).context_length == 256 and identify(args, load_model_spec(args)).fingerprint
    assert torch.equal(open_weights(args).find("model.layers.1.self_attn.q_proj.weight")[:],
                       model.model.layers[1].self_attn.q_proj.weight)
    with pytest.raises(ConfigError, match="lacks nothing"):
        open_weights(args).find("nothing")
    for params, error in (({"vision_encoder": {"dim": 8}}, "params.json has vision_encoder, which is not supported"),
                          ({}, "params.json lacks dim, hidden_dim, n_heads, n_layers, vocab_size")):
        (tmp_path / "params.json").write_text(json.dumps(params))
        with pytest.raises(ConfigError, match=error):
            load_model_spec(args)


def test_mistrals_experts(tmp_path):
    model = save_moe(tmp_path, "Mixtral")
    as_mistral(tmp_path, moe={"num_experts": 4, "num_experts_per_tok": 2})
    torch.testing.assert_close(logits_of(tmp_path, TOKENS), expected_logits(model, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numpys_copy_of_pickled_weights(tmp_path, dtype):
    """It is written once, and again when the files change."""
    save_model(tmp_path, "Llama")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    want = logits_of(tmp_path, TOKENS, load_format="pt")
    assert torch.equal(logits_of(tmp_path, TOKENS, load_format="npcache"), want)
    written = tmp_path / "np" / "model.norm.weight.npy"
    before = written.stat().st_mtime_ns
    args = ModelArgs(str(tmp_path), load_format="npcache")
    found = identify(args, load_model_spec(args)).fingerprint
    assert written.stat().st_mtime_ns == before
    torch.save({**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2, "scalar": torch.tensor(3.5)},
               tmp_path / "pytorch_model.bin")
    os.utime(tmp_path / "pytorch_model.bin", ns=(1, 1))
    assert not torch.equal(logits_of(tmp_path, TOKENS, load_format="npcache"), want)
    assert identify(args, load_model_spec(args)).fingerprint != found
    assert open_weights(args).find("scalar")[...].item() == 3.5
    with pytest.raises(ConfigError, match="lacks nothing"):
        open_weights(args).find("nothing")
    (tmp_path / "np" / "lock").unlink()
    (tmp_path / "np" / "lock").mkdir()
    with pytest.raises(ConfigError, match="--load-format npcache cannot write .*: make it writable, or use"):
        logits_of(tmp_path, TOKENS, load_format="npcache")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="holds no .bin or .pt files, which --load-format npcache copies"):
        logits_of(tmp_path, TOKENS, load_format="npcache")


def test_weights_are_quantized_one_at_a_time(tmp_path, monkeypatch):
    """While weights are quantized as they are read, less than a layer's are in memory besides the model's."""
    save_model(tmp_path, "Llama")
    sizes: dict[int, int] = {}
    most = [0]
    read = ReadTensor.__getitem__

    def counted(self, key):
        found = read(self, key)
        sizes[id(found)] = found.nbytes
        weakref.finalize(found, sizes.pop, id(found))
        most[0] = max(most[0], sum(sizes.values()))
        return found

    monkeypatch.setattr(ReadTensor, "__getitem__", counted)
    gc.collect()
    runner = load_runner(server_config(tmp_path, load_format="layered", quantization="fp8",
                                       weight_loader_disable_mmap=True))
    layer = sum(tensor.nbytes for name, tensor in load_file(tmp_path / "model.safetensors").items()
                if "layers.0." in name)
    assert 0 < most[0] < layer and runner.spec.quantization is not None


def test_the_model_streamer(tmp_path, monkeypatch):
    """Reads files with its own threads; where it is not installed that is said."""
    pytest.importorskip("runai_model_streamer")
    save_model(tmp_path, "Qwen3", shard="40KB")
    want = logits_of(tmp_path, TOKENS)
    assert torch.equal(logits_of(tmp_path, TOKENS, load_format="runai_streamer"), want)
    args = ModelArgs(str(tmp_path), load_format="runai_streamer")
    assert identify(args, load_model_spec(args)) == identify(ModelArgs(str(tmp_path)), load_model_spec(args))
    monkeypatch.setitem(sys.modules, "runai_model_streamer", None)
    with pytest.raises(ConfigError, match="needs the package runai-model-streamer, which is not installed: pip"):
        open_weights(args)
