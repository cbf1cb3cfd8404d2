"""GGUF files: read as models, by their metadata, in blocks that stay as they are, against transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.checkpoint import read_config
from baton.common.config.gguf_file import read_gguf
from baton.common.config.server import ModelArgs
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.models.registry import load_model_spec
from baton.common.quantization.gguf import Gguf
from baton.common.quantization.gguf_linear import GgufLinear
from baton.common.weights.fingerprint import identify
from baton.common.weights.slots import allocator
from baton.common.weights.source import open_weights
from baton.kernels.gguf_blocks import BLOCKS
from baton.kernels.reference import dequantize_gguf
from baton.tests.helpers.gguf_files import SIZES, random_blocks, save_gguf
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)
from baton.tests.helpers.small_moe import save_moe

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
CPU = torch.device("cpu")


def mixed(name: str) -> str:
    """Types as those of a Q4_K_M file: v and down have more bits, norms and biases are not quantized."""
    if "norm" in name or name.endswith("bias"):
        return "F32"
    return "Q6_K" if "v_proj" in name or "embed" in name else "Q5_K" if "down_proj" in name else "Q4_K"


def plain(name: str) -> str:
    return "F32" if "norm" in name else "F16"


def logits_of(path, **flags) -> torch.Tensor:
    runner = load_runner(server_config(path, **flags))
    pages = scattered_pages(runner, 1, 30)[0]
    return torch.cat((forward(runner, [(TOKENS[:29], 0, pages)]), forward(runner, [(TOKENS[29:], 29, pages)])))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_as_the_gguf_package_reads_them(kind):
    packed = random_blocks(kind, 3, 512)
    want = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantize_gguf(packed, kind).numpy(), want)


HEADS_OF_64 = {"Qwen3": {"head_dim": 64}, "Gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64}}


@pytest.mark.parametrize("family,architecture", [("Llama", "llama"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3"),
                                                 ("Gemma2", "gemma2")])
def test_a_file_computes_what_its_model_does(tmp_path, family, architecture):
    """Named, or found in its folder; q, k and v are in blocks of two types."""
    model = save_model(tmp_path / "model", family, **SIZES, **HEADS_OF_64.get(family, {}))
    file = tmp_path / "model-Q4_K_M.gguf"
    save_gguf(file, model, architecture, mixed)
    want = expected_logits(model, TOKENS)
    runner = load_runner(server_config(file))
    torch.testing.assert_close(logits_of(file), want, atol=2e-3, rtol=0)
    torch.testing.assert_close(logits_of(tmp_path, load_format="gguf"), want, atol=2e-3, rtol=0)
    attention = runner._weights.model.layers[0].attention
    assert [part.kind for part in attention.qkv.method.parts] == ["Q4_K", "Q6_K"]
    assert all(isinstance(part, GgufLinear) and part.packed.dtype == torch.uint8
               for part in attention.qkv.method.parts)
    assert runner.spec.eos_token_ids == (7,)


def test_what_is_not_quantized_runs_as_other_checkpoints(tmp_path):
    model = save_model(tmp_path / "model", "Llama", **SIZES, tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data = parameter.half().float()
    save_gguf(tmp_path / "a.gguf", model, "llama", plain)
    assert load_model_spec(ModelArgs(str(tmp_path / "a.gguf"))).quantization is None
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(model, TOKENS), atol=2e-3, rtol=0)


def test_experts_are_dequantized(tmp_path):
    sizes = {**SIZES, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2}
    model = save_moe(tmp_path / "model", "Qwen3Moe", **sizes)

    def experts(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(256)

    save_gguf(tmp_path / "a.gguf", model, "qwen3moe", lambda name: "F32" if name.endswith("gate.weight")
              else mixed(name), metadata=experts)
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(model, TOKENS), atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_ranks_have_their_rows_and_columns(kind):
    """Two ranks' parts are those of the whole; columns where they are whole blocks."""
    allocate = allocator(torch.float32, CPU, Gguf((("a", kind), ("b", kind))))
    column, row = random_blocks(kind, 64, 512), random_blocks(kind, 48, 512, seed=1)
    x = torch.randn(3, 512)
    made, summed = [], torch.zeros(3, 48)
    for rank in range(2):
        tp = TPGroup(rank, 2)
        columns = ColumnLinear(512, [Columns.shard("a", 64, tp)], False, allocate)
        rows = RowLinear("b", 512, 48, False, tp, allocate)
        for layer, packed in ((columns, column), (rows, row)):
            for slot in layer.slots():
                assert slot.shape == tuple(packed.shape)
                slot.fill(packed)
        made.append(columns(x))
        summed += rows.partial(x[:, rank * 256:][:, :256])
    torch.testing.assert_close(torch.cat(made, 1), x @ dequantize_gguf(column, kind).T)
    torch.testing.assert_close(summed, x @ dequantize_gguf(row, kind).T)
    if kind == "Q6_K":
        with pytest.raises(ConfigError, match="whose blocks have 256 values, .* has 128 inputs: choose a --tp-size"):
            RowLinear("b", 512, 48, False, TPGroup(1, 4), allocate)


def test_rotary_factors_of_llama_3(tmp_path):
    """The file has divisors of the frequencies; others than Llama 3's are refused."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = save_model(tmp_path / "model", "Llama", **SIZES, rope_parameters=scaling)
    file = tmp_path / "a.gguf"
    theirs = model.model.rotary_emb.inv_freq
    factors = (500000.0 ** -(torch.arange(0, 64, 2) / 64) / theirs).float()

    def save(values: torch.Tensor) -> None:
        save_gguf(file, model, "llama", plain,
                  metadata=lambda writer: writer.add_tensor("rope_freqs.weight", values.numpy()))

    save(factors)
    found = load_model_spec(ModelArgs(str(file))).family.rope
    assert found.rope_scaling == {name: value for name, value in scaling.items() if name != "rope_theta"}
    assert found.rope_theta == 500000.0 and not math.isclose(float(factors[0]), float(factors[-1]))
    save(factors * 2)
    with pytest.raises(ConfigError, match="in another way than Llama 3 does"):
        load_model_spec(ModelArgs(str(file)))


def test_parts_identity_and_tensors(tmp_path):
    model = save_model(tmp_path / "model", "Llama", **SIZES)
    file = tmp_path / "a.gguf"
    save_gguf(file, model, "llama", mixed)
    args = ModelArgs(str(file))
    first = identify(args, load_model_spec(args))
    assert torch.equal(open_weights(args).find("model.norm.weight")[:], model.model.norm.weight)
    norm = read_gguf(file).tensors["output_norm.weight"]
    with file.open("r+b") as content:
        content.seek(norm.start)
        content.write(np.float32(3.5).tobytes())
    assert identify(args, load_model_spec(args)).fingerprint != first.fingerprint
    with pytest.raises(ConfigError, match="lacks nothing"):
        open_weights(args).find("nothing")
    part = tmp_path / "b-00001-of-00002.gguf"
    file.rename(part)
    with pytest.raises(ConfigError, match="lacks b-00002-of-00002.gguf, of the 2 parts"):
        read_config(replace(args, model_path=str(part)))


def test_files_that_are_not_served(tmp_path):
    """Each is refused in one sentence."""
    def refusal(path=None) -> str:
        with pytest.raises(ConfigError) as error:
            load_model_spec(ModelArgs(str(path or tmp_path / "a.gguf")))
        return str(error.value)

    def write(architecture: str, kind: gguf.GGMLQuantizationType | None = None) -> None:
        writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), architecture)
        if kind is not None:
            writer.add_tensor("token_embd.weight", np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8),
                              raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("mamba")
    assert "GGUF files of mamba are not supported" in refusal()
    write("llama")
    assert "lacks llama.embedding_length" in refusal()
    write("llama", gguf.GGMLQuantizationType.IQ4_XS)
    assert "token_embd.weight in a.gguf is of the type IQ4_XS: use a file whose types are among" in refusal()
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:40])
    assert "its header is damaged" in refusal()
    (tmp_path / "a.gguf").write_bytes(b"ZIP!" * 9)
    assert "it is no GGUF file" in refusal()
    (tmp_path / "b.gguf").touch()
    assert "holds several GGUF files (a.gguf, b.gguf): let --model-path name one" in refusal(tmp_path)
    assert "it is empty" in refusal(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match="--quantization gguf is for checkpoints in GGUF files"):
        load_model_spec(ModelArgs("tinychat", quantization="gguf"))
    with pytest.raises(ConfigError, match="holds no .gguf files, which --load-format gguf reads"):
        open_weights(ModelArgs("tinychat", load_format="gguf"))
