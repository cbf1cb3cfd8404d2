"""Float8 weights: every form of checkpoint, weights quantized as they are loaded, and what is refused."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from baton.common.api.errors import ConfigError
from baton.common.distributed.deferred_reduce import DeferredSum
from baton.common.distributed.tp import TPGroup
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.layers.norm import RMSNorm
from baton.common.models.registry import load_model_spec
from baton.common.quantization.float8 import dequantize_blocks, quantize_blocks
from baton.common.quantization.fp8 import AS_LOADED, Fp8
from baton.common.quantization.methods import format_of
from baton.common.quantization.shards import Shard
from baton.common.weights.slots import allocator
from baton.kernels.arguments import Float8Rows
from baton.tests.common.distributed.test_tp import TP_RANK
from baton.tests.helpers.fp8_checkpoints import FINEGRAINED, FORMS, PACKED, SIZES, PlainLinear, save_float8, state
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
CPU = torch.device("cpu")


def logits_of(runner) -> torch.Tensor:
    pages = scattered_pages(runner, 1, 30)[0]
    return torch.cat((forward(runner, [(TOKENS[:29], 0, pages)]),
                      forward(runner, [(TOKENS[29:], 29, pages)])))


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_compute_what_the_plain_model_does(tmp_path, form):
    """But for values that lie between two float8 numbers, and fall to the other side by the order of a sum."""
    plain = expected_logits(save_float8(tmp_path, form), TOKENS)
    exact = expected_logits(save_model(tmp_path / "exact", "Qwen3", **SIZES), TOKENS)
    found = logits_of(load_runner(server_config(tmp_path)))
    assert rms(found - plain) < 0.1 * rms(plain - exact) < 0.05 * rms(exact)


@pytest.mark.parametrize("flag,form", [("fp8", "channel"), ("fp8_per_tensor", "tensor"), ("fp8_per_block", "blocks")])
def test_weights_are_quantized_as_they_are_loaded(tmp_path, flag, form):
    """As near to the exact model as the plain one; scales are not rounded to bfloat16 here."""
    plain = expected_logits(save_float8(tmp_path / "plain", form, "Qwen2"), TOKENS)
    exact = expected_logits(save_model(tmp_path, "Qwen2", **SIZES), TOKENS)
    runner = load_runner(server_config(tmp_path, quantization=flag))
    found = logits_of(runner)
    assert 0.01 * rms(exact) < rms(found - exact) < 1.3 * rms(plain - exact)
    again = logits_of(load_runner(server_config(tmp_path, quantization=flag, dtype="bfloat16")))
    assert rms(again - found) < rms(found - exact)


def test_as_transformers_quantizes(tmp_path):
    """Transformers' own float8 weights are read as it reads them."""
    save_model(tmp_path, "Qwen3", **SIZES)
    ops = type("Quantizer", (), {"quantization_config": FineGrainedFP8Config(weight_block_size=(128, 128))})()
    original = load_file(tmp_path / "model.safetensors")
    projections = {name: tensor for name, tensor in original.items() if "_proj" in name}
    written = Fp8Quantize(ops).convert(projections)
    save_file(original | written, tmp_path / "model.safetensors")
    state(tmp_path, {**FINEGRAINED, "modules_to_not_convert": None})
    runner = load_runner(server_config(tmp_path))
    mlp = runner._model.layers[1].mlp
    name = "model.layers.1.mlp"
    expected = {part: Fp8Dequantize(ops)._dequantize_one(
        written[f"{name}.{part}.weight"], written[f"{name}.{part}.weight_scale_inv"]) for part in (
            "gate_proj", "up_proj", "down_proj")}
    assert torch.equal(mlp.gate_up.method.dequantize(), torch.cat((expected["gate_proj"], expected["up_proj"])))
    assert torch.equal(mlp.down.method.dequantize(), expected["down_proj"])


SCHEMES = {**AS_LOADED, "stored channel": Fp8("channel", stored=True),
           "stored tensor": Fp8("tensor", "static", stored=True),
           "stored blocks": Fp8("block", stored=True)}


def filled(layer, tensors):
    for slot in layer.slots():
        slot.fill(tensors[slot.name])
    return layer


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_hold_parts_of_what_one_rank_holds(name):
    """With scales of the checkpoint, exactly; with a rank's own, as near as float8 is."""
    scheme = SCHEMES[name]
    torch.manual_seed(1)
    form = {"channel": "channel", "tensor": "static", "block": "blocks"}[scheme.weights]
    tensors, bias = {}, torch.randn(512)
    for index, part in enumerate("abc"):
        weight = torch.randn(512, 256) * (index + 1)
        plain = PlainLinear(weight, None, form)
        tensors |= plain.tensors(part) if scheme.stored else {f"{part}.weight": weight}
        tensors[f"{part}.bias"] = bias
    if scheme.weights == "block" and scheme.stored:
        tensors = {key.replace("_inv", ""): value for key, value in tensors.items()}
    allocate = allocator(torch.float32, CPU, scheme)
    whole: list = []
    for size in (1, 2):
        columns, rows = [], []
        for rank in range(size):
            tp = TPGroup(rank, size)
            column = filled(ColumnLinear(256, [Columns.shard(part, 512, tp) for part in "ab"], True, allocate), tensors)
            columns.append(column.method.dequantize().split(column.sizes))
            row = filled(RowLinear("c", 256, 512, False, tp, allocate), tensors)
            rows.append(row.method.dequantize())
        whole.append([torch.cat(parts) for parts in zip(*columns)] + [torch.cat(rows, 1)])
    for one, two in zip(*whole):
        atol, rtol = (0, 0) if scheme.stored else (0.02, 0.13)
        torch.testing.assert_close(one, two, atol=atol, rtol=rtol)
    if scheme.stored:
        torch.testing.assert_close(whole[0][2], plain.weight)


@pytest.mark.parametrize("scheme", [*AS_LOADED.values(), Fp8("tensor", "static", stored=True), None],
                         ids=str)
def test_norms_hand_over_rows_in_the_form_that_a_layer_takes(scheme):
    """Float8 where the layer's weights are, and nothing that it computes changes."""
    allocate = allocator(torch.float32, CPU, scheme)
    layer = ColumnLinear(200, [Columns("a", 128, 0, 128)], False, allocate)
    norm = RMSNorm("n", 200, 1e-5, allocate)
    for slot in (*layer.slots(), *norm.slots()):
        slot.fill(torch.full(slot.shape, 0.02) if "scale" in slot.kind.name else torch.randn(slot.shape))
    x, residual = torch.randn(5, 200), torch.randn(5, 200)
    plain, total = norm.add_norm(x, residual)
    given, same = norm.add_norm_as(layer.activation_format, x, residual)
    assert isinstance(given, Float8Rows) == (scheme is not None)
    assert torch.equal(layer(given), layer(plain)) and torch.equal(same, total)
    pending, _ = norm.add_norm_as(layer.activation_format, DeferredSum(x, TPGroup()), residual)
    assert torch.equal(layer(pending), layer(plain))


def test_static_scales_of_fused_projections():
    """The greatest of both is used, whatever was loaded before."""
    allocate = allocator(torch.float32, CPU, SCHEMES["stored tensor"])
    parts = {part: PlainLinear(torch.randn(16, 32), None, "static").tensors(part) for part in "ab"}
    layer = ColumnLinear(32, [Columns.shard(part, 16, TPGroup()) for part in "ab"], False, allocate)
    for scales in ((0.5, 0.1), (0.02, 0.04)):
        for part, scale in zip("ab", scales):
            parts[part][f"{part}.input_scale"] = torch.tensor([scale])
        filled(layer, parts["a"] | parts["b"])
        assert layer.method.input_scale.item() == pytest.approx(max(scales))
    x = torch.randn(3, 32)
    limited = (x / 0.04).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.04
    torch.testing.assert_close(layer(x), limited @ layer.method.dequantize().T)


def test_two_ranks_equal_one(tmp_path):
    checkpoint = tmp_path / "model"
    save_float8(checkpoint, "blocks")
    want = logits_of(load_runner(server_config(checkpoint)))
    dummy = load_runner(server_config(checkpoint, load_format="dummy"))
    for rank in run_ranks(TP_RANK, 2, tmp_path, str(checkpoint)):
        assert rms(rank["logits"]["checkpoint"] - want) < 0.01 * rms(want)
        torch.testing.assert_close(rank["logits"]["dummy"], logits_of(dummy), atol=0.02, rtol=0)


@pytest.mark.parametrize("shape", [(256, 128), (3, 200, 300), (2, 3, 130, 5)])
def test_stacked_blocks_and_back(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 5
    q, scale = quantize_blocks(weight, (128, 128))
    assert q.shape == shape and scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    back = dequantize_blocks(q, scale, (128, 128))
    assert (back - weight).abs().max() < 0.04 * weight.abs().max()
    for index in np.ndindex(*shape[:-2]):
        one = quantize_blocks(weight[index], (128, 128))
        assert torch.equal(one[0].float(), q[index].float()) and torch.equal(one[1], scale[index])


# ---- what the engine does with weights

@pytest.mark.parametrize("form", ["blocks", "static", None])
def test_weights_are_updated_released_and_resumed(tmp_path, form):
    flag = None if form else "fp8"
    for seed, folder in enumerate(("first", "second")):
        if form:
            save_float8(tmp_path / folder, form, rms_norm_eps=1e-6)
        else:
            save_model(tmp_path / folder, "Qwen3", **SIZES)
        file = tmp_path / folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].roll(seed, 0)
        save_file(tensors, file)
    runner, other = (load_runner(server_config(tmp_path / folder, quantization=flag)) for folder in ("first", "second"))
    first, second = logits_of(runner), logits_of(other)
    assert not torch.allclose(first, second)
    runner.release(("weights",))
    assert runner._model.layers[0].mlp.down.method.weight.untyped_storage().nbytes() == 0
    runner.resume(("weights",), complete=True)
    assert torch.equal(logits_of(runner), first)
    runner.check_weights(str(tmp_path / "second"), None)
    runner.update_weights(str(tmp_path / "second"), None)
    assert torch.equal(logits_of(runner), second)


def test_an_update_by_weights_of_another_form_changes_nothing(tmp_path):
    save_float8(tmp_path / "float8", "blocks")
    save_model(tmp_path / "exact", "Qwen3", **SIZES)
    runner = load_runner(server_config(tmp_path / "float8"))
    with pytest.raises(ConfigError, match="another model than the one that runs: quantization differ"):
        runner.check_weights(str(tmp_path / "exact"), None)


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights(tmp_path, form):
    save_float8(tmp_path, form)
    (tmp_path / "model.safetensors").unlink()
    found = [logits_of(load_runner(server_config(tmp_path, load_format="dummy", random_seed=seed)))
             for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.allclose(*found[1:])
    state(tmp_path, None)
    exact = logits_of(load_runner(server_config(tmp_path, load_format="dummy", random_seed=1)))
    assert rms(found[0] - exact) < 0.2 * rms(exact)  # the same model, whether weights are drawn in float8 or not


# ---- refused

def spec_with(folder, stated, flag=None):
    save_model(folder, "Qwen3", **SIZES)
    state(folder, stated)
    return load_model_spec(server_config(folder, quantization=flag).model)


def packed(path: str, value) -> dict:
    stated = copy.deepcopy(PACKED)
    *way, last = path.split(".")
    inner = stated
    for key in way:
        inner = inner[key]
    inner[last] = value
    return stated


GROUP = "config_groups.group_0"
REFUSED = [
    ({"quant_method": "odd"}, None, "quantized by 'odd' are not supported"),
    (FINEGRAINED, "fp8_per_block", "--quantization fp8_per_block is for checkpoints that are not quantized"),
    ({**FINEGRAINED, "activation_scheme": "static"}, None, "use a checkpoint whose activation_scheme is 'dynamic'"),
    ({**FINEGRAINED, "activation_scheme": "odd"}, None, "activation_scheme 'odd' is not supported"),
    ({**FINEGRAINED, "weight_block_size": 128}, None, "blocks of size 128 are not supported"),
    (packed(f"{GROUP}.weights.num_bits", 4), None, "Weights in NVFP4 or MXFP4 of compressed-tensors"),
    (packed(f"{GROUP}.input_activations", None), None, "input_activations not quantized"),
    (packed(f"{GROUP}.weights.strategy", "group"), None, "quantized by 'group' are not supported"),
    (packed(f"{GROUP}.input_activations.dynamic", False), None, "Static input_activations are supported where"),
    (packed(f"{GROUP}.targets", ["Linear", "Embedding"]), None, "Quantized embeddings are not supported"),
    (packed("config_groups", {}), None, "must have config_groups"),
]


@pytest.mark.parametrize("stated,flag,sentence", REFUSED, ids=[sentence[:30] for _, _, sentence in REFUSED])
def test_unsupported_forms_are_refused(tmp_path, stated, flag, sentence):
    with pytest.raises(ConfigError) as error:
        spec_with(tmp_path, stated, flag)
    assert sentence in str(error.value)


def test_a_flag_that_says_what_the_checkpoint_is_passes(tmp_path):
    assert spec_with(tmp_path, FINEGRAINED, "fp8") == spec_with(tmp_path, FINEGRAINED)
    ignored = packed("ignore", ["lm_head", "re:.*layers\\.[02]\\..*", "mlp.gate"])
    scheme = spec_with(tmp_path, ignored).quantization
    names = {"model.layers.0.mlp.up_proj": False, "model.layers.1.mlp.up_proj": True, "model.layers.1.mlp.gate": False,
             "model.layers.1.mlp.gate_proj": True, "model.layers.10.mlp.up_proj": True, "lm_head": False}
    assert {name: scheme.for_layer(name) is not None for name in names} == names
    for flag in ("fp8", "compressed-tensors"):
        assert spec_with(tmp_path, ignored, flag).quantization == scheme
    mixed = spec_with(tmp_path, packed(f"{GROUP}.weights", {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]})).quantization
    blocks = mixed.for_layer("model.layers.0.mlp.up_proj")
    assert blocks.weights == "block" and blocks.stored and blocks.weight_scale == "weight_scale"


def refusal(folder, tp: TPGroup, allocate) -> str:
    with pytest.raises(ConfigError) as error:
        ColumnLinear(256, [Columns.kv_shard(part, 4, 64, tp) for part in "kv"], False, allocate)
    return str(error.value)


def test_shards_that_cut_blocks_are_refused(tmp_path):
    for name in ("fp8_per_block", "stored blocks"):
        allocate = allocator(torch.float32, CPU, SCHEMES[name])
        ColumnLinear(256, [Columns.kv_shard(part, 4, 64, TPGroup(1, 2)) for part in "kv"], False, allocate)
        assert "share of 64 of its 256 outputs does not fill: choose another --tp-size" in refusal(
            tmp_path, TPGroup(1, 4), allocate)
        with pytest.raises(ConfigError, match="share of 64 of its 256 inputs"):
            RowLinear("o", 256, 128, False, TPGroup(0, 4), allocate)
        RowLinear("odd", 200, 130, False, TPGroup(), allocate)  # its last blocks are smaller
        with pytest.raises(ConfigError, match="its 130 outputs are no multiple of 128"):
            ColumnLinear(256, [Columns.shard(part, 130, TPGroup()) for part in "ab"], False, allocate)


def test_fused_projections_of_which_some_are_quantized(tmp_path):
    """Each is computed in its own format."""
    plain = save_float8(tmp_path, "blocks")
    exact = save_model(tmp_path / "exact", "Qwen3", **SIZES)
    tensors, kept = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "exact"))
    for name in [name for name in tensors if "q_proj" in name]:
        tensors.pop(name)
    for layer, other in zip(plain.model.layers, exact.model.layers):
        layer.self_attn.q_proj = other.self_attn.q_proj
    save_file(tensors | {name: tensor for name, tensor in kept.items() if "q_proj" in name},
              tmp_path / "model.safetensors")
    state(tmp_path, {**FINEGRAINED, "modules_to_not_convert": ["q_proj"]})
    want = expected_logits(plain, TOKENS)
    found = logits_of(load_runner(server_config(tmp_path)))
    assert rms(found - want) < 0.01 * rms(want)


def test_experts_that_are_quantized_in_part_are_refused(tmp_path):
    allocate = allocator(torch.float32, CPU, Fp8("block", stored=True, ignored=("up_proj",)))
    with pytest.raises(ConfigError, match="quantizes e.up_proj otherwise than e.gate_proj"):
        format_of([Shard(f"e.{part}_proj", 0, 128, (128, 128), 0, 0) for part in ("gate", "up")], allocate)


def test_weights_that_are_not_what_the_configuration_says(tmp_path):
    save_float8(tmp_path, "blocks")
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    state(tmp_path, None)
    with pytest.raises(ConfigError, match="_proj.weight in model.safetensors is float8, but by config.json it is not"):
        load_runner(server_config(tmp_path))
    save_model(tmp_path, "Qwen3", **SIZES)
    state(tmp_path, stated)
    with pytest.raises(ConfigError, match=r"_proj.weight in model.safetensors is F32, but by config.json it is float8"):
        load_runner(server_config(tmp_path))


def test_flags_on_a_gpu():
    """Told by names alone, so that a machine without one can ask."""
    from unittest.mock import patch

    from baton.common.quantization.float8 import check_float8

    gpu = torch.device("cuda", 0)
    for capability, scheme, dtype, sentence in (
            ((8, 0), AS_LOADED["fp8"], "bfloat16", "Old does not compute in float8"),
            ((9, 0), AS_LOADED["fp8"], "float16", "served with --dtype bfloat16 on a GPU, not float16"),
            ((9, 0), Fp8("block", stored=True, block=(64, 64)), "bfloat16",
             "Blocks of 64 x 64 are not supported")):
        with patch("torch.cuda.get_device_capability", return_value=capability), \
             patch("torch.cuda.get_device_name", return_value="Old"), pytest.raises(ConfigError, match=sentence):
            scheme.check_device(dtype, gpu)
        if capability < (8, 9):
            with patch("torch.cuda.get_device_capability", return_value=capability), \
                 patch("torch.cuda.get_device_name", return_value="Old"), \
                 pytest.raises(ConfigError, match="capability 8.9 or more, or --kv-cache-dtype auto"):
                check_float8(gpu, "--kv-cache-dtype auto")
    AS_LOADED["fp8"].check_device("float16", CPU)
