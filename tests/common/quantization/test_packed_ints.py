"""Weights in 4 and 8 bits: every form of checkpoint, what ranks hold of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.moe import MoESpec
from baton.common.config.quantization import choose_quantization
from baton.common.config.server import OffloadArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.layers.dense_weight import DenseWeight
from baton.common.layers.linear import ColumnLinear, Columns, RowLinear
from baton.common.layers.moe.experts import Experts
from baton.common.weights.slots import Slot, allocator, finish_loading
from baton.common.weights.staging import Staging
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.packed_checkpoints import FORMS, Form, quantize, save_packed
from baton.tests.helpers.small_models import forward, load_runner, logits_of, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe
from baton.tests.helpers.thread_ranks import on_ranks
from baton.tests.integration.transfer.test_deepseek_relay import pair_equal_to_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, bootstrap_port

__all__ = ["bootstrap_port"]
TOKENS = np.random.default_rng(2).integers(0, VOCAB, 30)
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CPU = torch.device("cpu")

dense_model = partial(save_model, family="Qwen2", tie_word_embeddings=True, **SIZES)
moe_sizes = {**SIZES, "moe_intermediate_size": 64}
SAVE = {"Phi3": partial(save_model, family="Phi3", pad_token_id=0, **SIZES),
        "Mixtral": partial(save_moe, family="Mixtral", **SIZES),
        "Qwen3Moe": partial(save_moe, family="Qwen3Moe", **moe_sizes),
        "DeepSeek": lambda folder: save_deepseek(folder, 3, **moe_sizes, q_lora_rank=32, kv_lora_rank=32,
                                                  v_head_dim=16)}


def assert_equal_to_dense(folder: Path, dense: Path) -> None:
    want, found = logits_of(dense, TOKENS), logits_of(folder, TOKENS)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_compute_what_their_floating_point_weights_do(tmp_path, form, caplog):
    assert_equal_to_dense(tmp_path / "model", save_packed(tmp_path / "model", FORMS[form], dense_model))
    assert "are not loaded" not in caplog.text


@pytest.mark.parametrize("family,form", [
    ("Mixtral", "gptq"), ("Mixtral", "gptq act-order"), ("Qwen3Moe", "awq"), ("Qwen3Moe", "compressed-tensors 8 bits"),
    ("DeepSeek", "awq"), ("DeepSeek", "gptq act-order"), ("Phi3", "awq"), ("Phi3", "compressed-tensors asymmetric")])
def test_other_families(tmp_path, family, form):
    """Experts, projections that the checkpoint has fused, and a latent's up-projection, which is multiplied in parts
    and dequantized for that."""
    assert_equal_to_dense(tmp_path / "model", save_packed(tmp_path / "model", FORMS[form], SAVE[family]))


# ---- several formats in one checkpoint

def test_rules_of_gptqmodel_override_and_skip_layers(tmp_path):
    form = FORMS["gptq"]
    form = Form({**form.stated, "dynamic": {"-:.*\\.k_proj": {}, "+:.*layers\\.1\\..*": {"bits": 8, "group_size": -1},
                                            ".*down_proj": {"sym": False}}}, form.write)
    forms = {"k_proj": Form({}, form.write, ignored=("k_proj",)), "layers.1.": FORMS["gptq 8 bits, whole columns"],
             "down_proj": Form({}, form.write, symmetric=False)}
    forms["layers.1."].act_order = False
    assert_equal_to_dense(tmp_path / "model", save_packed(tmp_path / "model", form, dense_model, forms))
    spec = choose_quantization({"quantization_config": form.stated}, "gptq_marlin")
    names = {"layers.0.k_proj": None, "layers.1.q_proj": 8, "layers.0.down_proj": 4, "layers.0.up_proj": 4}
    assert {name: getattr(spec.for_layer(f"model.{name}"), "bits", None) for name in names} == names


def test_groups_of_compressed_tensors_have_schemes_of_their_own(tmp_path):
    """Some layers in 4 bits, some in 8, and one in float8."""
    four, eight = FORMS["compressed-tensors"], FORMS["compressed-tensors 8 bits"]
    float8 = {"targets": ["re:.*layers.1.mlp.down_proj"], "format": "float-quantized",
              "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
              "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}
    groups = {"group_0": four.stated["config_groups"]["group_0"], "group_2": float8,
              "group_1": {**eight.stated["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}}
    form = Form({**four.stated, "config_groups": groups}, four.write)
    kept = Form({}, four.write, ignored=("down_proj",))
    dense = save_packed(tmp_path / "model", form, dense_model, {"self_attn": eight, "layers.1.mlp.down_proj": kept})
    tensors, name = load_file(tmp_path / "model" / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    scale = tensors[name].abs().amax(1, keepdim=True) / 448
    packed = tensors | {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(packed, tmp_path / "model" / "model.safetensors")
    want, found = logits_of(dense, TOKENS), logits_of(tmp_path / "model", TOKENS)
    assert 0 < (found - want).norm() < 0.04 * want.norm()  # float8 rounds


# ---- ranks

def filled(layer, tensors: dict[str, torch.Tensor]):
    slots = list(layer.slots())
    for slot in slots:
        if slot.name in tensors:
            slot.fill(tensors[slot.name])
    finish_loading(slots)
    return layer


def format_of(form: Form):
    found = choose_quantization({"quantization_config": form.stated}, None)
    assert found is not None
    return found


@pytest.mark.parametrize("name", FORMS)
def test_ranks_hold_parts_of_what_one_rank_holds(name):
    form = FORMS[name]
    torch.manual_seed(1)
    allocate, tensors = allocator(torch.float32, CPU, format_of(form)), {}
    for seed, part in enumerate("abc"):
        q = quantize(torch.randn(64, 128), form.bits, form.group, form.symmetric, form.act_order, seed)
        tensors |= {f"{part}.{key}": value for key, value in form.write(q).items()}
    x, found = torch.randn(5, 128), []
    for size in (1, 2):
        columns, sums, wholes = [], [], []
        for rank in range(size):
            tp = TPGroup(rank, size)
            column = filled(ColumnLinear(128, [Columns.shard(part, 64, tp) for part in "ab"], False, allocate), tensors)
            columns.append(torch.stack(column(x).split(column.sizes, -1)))
            row = filled(RowLinear("c", 128, 64, False, tp, allocate), tensors)
            sums.append(row.partial(x.chunk(size, -1)[rank]))
            wholes.append(row.method.dequantize())
        found.append((torch.cat(columns, -1), sum(sums), torch.cat(wholes, 1)))
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][2], q.weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family,form", [("Qwen2", "gptq act-order"), ("Qwen3Moe", "awq"), ("Qwen3Moe", "gptq"),
                                         ("DeepSeek", "compressed-tensors")])
def test_two_ranks_compute_what_one_does(tmp_path, family, form):
    save_packed(tmp_path / "model", FORMS[form], dense_model if family == "Qwen2" else SAVE[family])

    def compute(tp: TPGroup) -> torch.Tensor:
        runner = load_runner(server_config(tmp_path / "model", tp=tp.size), Parallel(tp))
        return forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 30)[0])])

    want = logits_of(tmp_path / "model", TOKENS)
    for found in on_ranks(2, compute):
        torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.argmax(-1), want.argmax(-1))


def test_tensors_arrive_in_any_order_and_are_replaced_one_by_one():
    """Weights are sorted by the groups that are loaded, whichever of the two came first, and sorted anew after each
    update."""
    form = FORMS["gptq act-order"]
    q, other = (quantize(torch.randn(16, 64), 4, 32, False, True, seed) for seed in (1, 2))
    first, second = ({f"c.{key}": value for key, value in form.write(each).items()} for each in (q, other))
    for names in (["g_idx", "qweight"], ["qweight", "g_idx"]):
        layer = RowLinear("c", 64, 16, False, TPGroup(), allocator(torch.float32, CPU, format_of(form)))
        filled(layer, first)
        for name in (*names, "scales", "qzeros"):
            filled(layer, {f"c.{name}": second[f"c.{name}"]})
        torch.testing.assert_close(layer.method.dequantize(), other.weight)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.group == 64 and not form.act_order])
def test_ranks_may_cut_groups(name):
    """Each of two has one group and a half, and the scales of all three."""
    form = FORMS[name]
    q = quantize(torch.randn(16, 192), form.bits, 64, form.symmetric, False, 1)
    tensors = {f"c.{key}": value for key, value in form.write(q).items()}
    parts = [filled(RowLinear("c", 192, 16, False, TPGroup(rank, 2), allocator(torch.float32, CPU, format_of(form))),
                    tensors) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part.method.dequantize() for part in parts], 1), q.weight, atol=1e-6,
                               rtol=1e-5)


def test_shares_that_cut_words_are_refused():
    allocate = allocator(torch.float32, CPU, format_of(FORMS["gptq asymmetric v2"]))
    with pytest.raises(ConfigError, match="share of 48 of its 192 inputs is no multiple of 32: choose"):
        RowLinear("o", 192, 64, False, TPGroup(0, 4), allocate)
    with pytest.raises(ConfigError, match="has 96 inputs, which groups of 64 do not divide"):
        RowLinear("o", 96, 64, False, TPGroup(), allocate)
    with pytest.raises(ConfigError, match="packs 8 outputs in a word, which a rank's share of 4 of its 8 outputs cuts"):
        ColumnLinear(64, [Columns.shard("a", 8, TPGroup(1, 2))], False, allocate)


# ---- weights that are loaded in other ways

def test_dummy_weights(tmp_path):
    for name in ("awq", "gptq 8 bits, act-order"):
        folder = tmp_path / name
        save_packed(folder, FORMS[name], dense_model)
        (folder / "model.safetensors").unlink()
        found = [logits_of(folder, TOKENS, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)]
        assert torch.equal(*found[:2]) and not torch.allclose(*found[1:]) and found[0].isfinite().all()
        exact = logits_of(folder.with_name(f"{name}-dense"), TOKENS, load_format="dummy", random_seed=1)
        assert 0.3 < found[0].std() / exact.std() < 3


def test_a_dense_weight_is_dequantized_whenever_it_is_loaded():
    form = FORMS["gptq act-order"]
    layer = DenseWeight(Columns("c", 16, 0, 16), 64, allocator(torch.float32, CPU, format_of(form)))
    for seed in (1, 2):
        q = quantize(torch.randn(16, 64), 4, 32, False, True, seed)
        filled(layer, {f"c.{key}": value for key, value in form.write(q).items()})
        torch.testing.assert_close(layer.weight, q.weight)


@pytest.mark.parametrize("form", ["gptq act-order", "awq"])
def test_weights_are_updated_offloaded_and_released(tmp_path, form):
    """Another checkpoint replaces the weights, tensors of a trainer do, and layers in host memory compute the
    same."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_packed(first, FORMS[form], partial(scaled, factor=1.0))
    dense = save_packed(second, FORMS[form], partial(scaled, factor=1.5))
    want, pages = logits_of(dense, TOKENS), scattered_pages(load_runner(server_config(first)), 1, 30)[0]
    for offload in (OffloadArgs(), OffloadArgs(offload_group_size=1)):
        runner = load_runner(dataclasses.replace(server_config(first), offload=offload))
        before = forward(runner, [(TOKENS, 0, pages)])
        runner.check_weights(str(second), None)
        runner.update_weights(str(second), None)
        torch.testing.assert_close(forward(runner, [(TOKENS, 0, pages)]), want, atol=1e-4, rtol=1e-4)
        runner.release(["weights"])
        runner.resume(["weights"], complete=True)
        staging = Staging(runner.destinations())
        for name, tensor in load_file(first / "model.safetensors").items():
            if not name.endswith(".bias") or "q_proj" in name or "k_proj" in name or "v_proj" in name:
                staging.add(name, tensor)
        staging.close()
        staging.apply()
        torch.testing.assert_close(forward(runner, [(TOKENS, 0, pages)]), before, atol=1e-5, rtol=1e-5)


def scaled(folder: Path, factor: float) -> None:
    """Saves a model of three layers with other weights."""
    dense_model(folder, num_hidden_layers=3)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * factor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["awq", "gptq act-order", "compressed-tensors 8 bits"])
def test_slices_of_ranks_experts_add_up(name):
    """Both ways of sharing experts: whole ones, and halves of each."""
    form = FORMS[name]
    torch.manual_seed(0)
    spec, tensors = MoESpec(num_experts=4, top_k=2, intermediate_size=64, layers=(0,)), {}
    for expert in range(4):
        for seed, (part, shape) in enumerate((("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64)))):
            q = quantize(torch.randn(shape), form.bits, form.group, form.symmetric, form.act_order, seed + expert)
            layer = f"e.{expert}.{part}_proj"
            tensors |= {f"{layer}.{key}": value for key, value in form.write(q).items()}

    def experts(share: ExpertParallel) -> Experts:
        layer = Experts("e", spec, 32, share, allocator(torch.float32, CPU, format_of(form)))
        return filled(layer, tensors)

    x, weights = torch.randn(9, 32), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    want = experts(ExpertParallel(TPGroup()))(x, ids, weights)
    for ep in (1, 2):
        parts = [experts(ExpertParallel(TPGroup(rank, 2), ep))(x, ids - (rank * 2 if ep == 2 else 0), weights)
                 for rank in range(2)]
        torch.testing.assert_close(sum(parts), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("form", ["gptq act-order", "compressed-tensors"])
def test_disaggregated_tokens_equal_unified(tmp_path, bootstrap_port, form):  # noqa: F811 (the fixture)
    save_packed(tmp_path / "model", FORMS[form], dense_model)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 50, 4)]
    with pair_equal_to_unified(tmp_path / "model", prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0


# ---- flags, and what is refused

@pytest.mark.parametrize("form,flags", [("awq", ("awq", "awq_marlin", "moe_wna16")),
                                        ("gptq", ("gptq", "gptq_marlin", "moe_wna16")),
                                        ("auto-round", ("auto-round", "gptq")),
                                        ("compressed-tensors", ("compressed-tensors",))])
def test_flags_that_say_what_the_checkpoint_is(form, flags):
    config = {"quantization_config": FORMS[form].stated}
    assert {flag for flag in flags if choose_quantization(config, flag) != choose_quantization(config, None)} == set()
    for flag in {"awq", "gptq", "fp8"} - {*flags}:
        with pytest.raises(ConfigError, match="leave the flag out"):
            choose_quantization(config, flag)


@pytest.mark.parametrize("file,form", [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_a_configuration_in_a_file_of_its_own(tmp_path, file, form):
    dense = save_packed(tmp_path / "model", FORMS[form], dense_model)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    own = config.pop("quantization_config")
    if form == "awq":
        own = {"w_bit": own.pop("bits"), "q_group_size": own.pop("group_size"), **own}
    del own["quant_method"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / file).write_text(json.dumps(own))
    assert_equal_to_dense(tmp_path / "model", dense)


def stated(form: str, **changes) -> dict:
    return {**FORMS[form].stated, **changes}


def of_group(**changes) -> dict:
    group = FORMS["compressed-tensors"].stated["config_groups"]["group_0"]
    return stated("compressed-tensors",
                  config_groups={"g": {**group, "weights": {**group["weights"], **changes}}})


REFUSED = [
    (stated("awq", version="gemv"), "version 'gemv' are not supported"),
    (stated("awq", backend="llm-awq"), "the backend 'llm-awq' are not supported"),
    (stated("awq", bits=3), "AWQ weights in 3 bits are not supported"),
    (stated("gptq", bits=3), "Weights in 3 bits are not supported"),
    (stated("gptq", group_size=16), "Groups of 16 inputs are not supported"),
    (stated("gptq", lm_head=True), "A quantized output head is not supported"),
    (stated("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin' are not supported"),
    (stated("auto-round", packing_format="auto_round:exllamav2"), "packing_format 'auto_round:exllamav2'"),
    (stated("auto-round", data_type="mx_fp"), "data_type 'mx_fp' are not supported"),
    (stated("compressed-tensors", format="marlin-24"), "format 'marlin-24' of compressed-tensors"),
    (of_group(strategy="tensor"), "quantized by 'tensor' are not supported"),
    (of_group(num_bits=2), "Weights in 2 bits are not supported"),
    (of_group(type="odd"), "weights are 4-bit odd and input_activations not quantized"),
]


@pytest.mark.parametrize("config,sentence", REFUSED, ids=[sentence[-30:] for _, sentence in REFUSED])
def test_unsupported_forms_are_refused(config, sentence):
    with pytest.raises(ConfigError) as error:
        choose_quantization({"quantization_config": config}, None)
    assert sentence in str(error.value)


def test_groups_that_the_configuration_does_not_say(tmp_path):
    save_packed(tmp_path / "model", FORMS["gptq act-order"], dense_model)
    file = tmp_path / "model" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.down_proj.g_idx"
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, file)
    with pytest.raises(ConfigError, match="down_proj.g_idx does not put 32 inputs into each of 4 groups"):
        logits_of(tmp_path / "model", TOKENS)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        logits_of(tmp_path / "model", TOKENS)


def test_a_tensor_that_is_not_packed_is_refused(tmp_path):
    dense = save_packed(tmp_path / "model", FORMS["compressed-tensors"], dense_model)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks .*weight_packed"):
        logits_of(dense, TOKENS)


def test_slots_say_how_much_they_read():
    """A rank's slice of a tensor that is stored in another shape than the checkpoint's."""
    allocate = allocator(torch.float32, CPU, format_of(FORMS["awq"]))
    slots: dict[str, Slot] = {slot.name: slot for slot in
                              RowLinear("c", 128, 64, False, TPGroup(1, 2), allocate).slots()}
    for name, shape in {"qweight": (64, 8), "scales": (2, 64), "qzeros": (2, 8)}.items():
        slot = slots[f"c.{name}"]
        assert tuple(slot.part_of(torch.zeros(slot.shape)).shape) == shape
