"""Dumps of tensors: against transformers' modules, of every kind of server, and what is dumped when."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.api.sampling import SamplingParams
from baton.common.runner import tensor_dump
from baton.tests.common.models.test_transformers_impl import save as save_for_transformers
from baton.tests.helpers import parity_rank
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, algorithm_flags, num_drafts, questions
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.dumped_tensors import HEADS, INFO, by_position, module_outputs, passes_of
from baton.tests.helpers.flag_engine import FlagEngine, FlagPair, Question, bootstrap_server
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import save_model
from baton.tests.helpers.small_moe import save_moe

MAKERS = {"Llama": save_model, "Qwen3": save_model, "Qwen3Moe": save_moe,
          "DeepseekV3": lambda folder, family: save_deepseek(folder, 3)}
LAYER = ("", ".input_layernorm", ".self_attn", ".self_attn.o_proj", ".post_attention_layernorm", ".mlp")
FLAGS = ("--max-total-tokens", "2048", "--page-size", "4", "--chunked-prefill-size", "16", "--random-seed", "1")
TOLERANCE = 1e-4


def question(length: int, seed: int = 0, count: int = 4) -> Question:
    return Question(np.random.default_rng(seed).integers(8, 96, length).tolist(),
                    SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True))


def dump_flags(model: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return ("--model-path", str(model), "--skip-tokenizer-init", "--debug-tensor-dump-output-folder", str(folder),
            *FLAGS, *more)


def own_folder(folder: Path, pid: int | None = None, rank: int = 0) -> Path:
    return folder / f"TP{rank}_PP0_Rank{rank}_pid{pid or os.getpid()}"


def assert_equal(passes, outputs, names) -> None:
    for name in names:
        rows = by_position(passes, name)
        expected = outputs["lm_head" if name == "logits_processor" else name]
        assert rows, name
        for position, row in rows.items():
            torch.testing.assert_close(row, expected[position], atol=TOLERANCE, rtol=0, msg=f"{name} at {position}")


def layer_names(count: int = 3) -> list[str]:
    return [f"model.layers.{layer}{part}" for layer in range(count) for part in LAYER]


@pytest.mark.parametrize("family", MAKERS)
def test_modules_have_the_values_of_transformers(tmp_path, family):
    model = MAKERS[family](tmp_path / "model", family)
    engine = FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump"))
    asked = question(37)
    tokens = engine.answers([asked])[0].tokens
    passes = passes_of(own_folder(tmp_path / "dump"))
    assert [each[INFO + "extend_seq_lens"].tolist() for each in passes] == [[16], [16], [5], [1], [1], [1]]
    assert [each[INFO + "seq_lens"].item() for each in passes] == [16, 32, 37, 38, 39, 40]
    ids = by_position(passes, INFO + "input_ids")
    assert [ids[position].item() for position in range(40)] == [*asked.prompt, *tokens[:3]]
    outputs = module_outputs(model, [*asked.prompt, *tokens])
    assert_equal(passes, outputs, [*layer_names(), "model.embed_tokens"])
    assert_equal(passes[2:], outputs, HEADS)
    assert [by_position(passes[2:], "lm_head")[36 + i].argmax().item() for i in range(4)] == tokens
    attention = passes[0]["model.layers.0.self_attn.attn"]
    assert len(attention) == 16 and not torch.equal(attention, torch.zeros_like(attention))


def test_of_transformers_own_layers(tmp_path):
    model = save_for_transformers(tmp_path / "model", "Olmo2")
    engine = FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump", "--model-impl", "transformers"))
    asked = question(20)
    tokens = engine.answers([asked])[0].tokens
    passes = passes_of(own_folder(tmp_path / "dump"))
    outputs = module_outputs(model, [*asked.prompt, *tokens])
    own = {name for name in outputs if not name.endswith("rotary_emb") and ".mlp." not in name}  # one block of ours
    assert own <= set(passes[0]) and "model.layers.2.post_feedforward_layernorm" in own
    assert_equal(passes, outputs, own - {"lm_head"})
    assert_equal(passes[1:], outputs, ["lm_head"])


def test_a_pair_dumps_prompts_at_prefill_and_the_rest_at_decode(tmp_path):
    model = save_model(tmp_path / "model", "Llama")
    asked = question(37)
    with bootstrap_server() as port:
        folders = [tmp_path / "prefill", tmp_path / "decode"]
        pair = FlagPair(port, dump_flags(tmp_path / "model", folders[0]),
                        decode_flags=("--debug-tensor-dump-output-folder", str(folders[1])))
        try:
            tokens = pair.answers([asked])[0].tokens
        finally:
            pair.close()
    outputs = module_outputs(model, [*asked.prompt, *tokens])
    prefill, decode = (passes_of(own_folder(folder)) for folder in folders)
    for passes, positions in ((prefill, range(37)), (decode, range(37, 40))):
        assert_equal(passes, outputs, layer_names())
        assert sorted(by_position(passes, "model.layers.2")) == list(positions)
    assert_equal(decode, outputs, HEADS)


@pytest.mark.parametrize("groups", [(), ("--enable-dp-attention", "--dp-size", "2")], ids=["tp", "dp"])
def test_each_rank_has_a_folder(tmp_path, groups):
    """With data-parallel attention one request leaves the other rank idle: it dumps nothing."""
    model = save_model(tmp_path / "model", "Llama")
    asked = question(37)
    flags = dump_flags(tmp_path / "model", tmp_path / "dump", "--dist-timeout", "120", *groups)
    (tmp_path / "asked").write_bytes(pickle.dumps((flags, [asked], False)))
    answers = run_ranks(Path(parity_rank.__file__), 2, tmp_path, str(tmp_path / "asked"))
    tokens = answers[0][0]["tokens"]
    outputs = module_outputs(model, [*asked.prompt, *tokens])
    folders = sorted((tmp_path / "dump").iterdir())
    assert [folder.name.rpartition("_")[0] for folder in folders] == ["TP0_PP0_Rank0", "TP1_PP0_Rank1"]
    dumps = [passes_of(folder) for folder in folders]
    assert [len(dump) for dump in dumps] == [6, 0 if groups else 6]
    for dump in filter(None, dumps):
        assert_equal(dump, outputs, [*layer_names(), "model.embed_tokens"])
        assert_equal(dump[2:], outputs, HEADS)


def test_chosen_layers_of_prompts_alone(tmp_path):
    """The last token of a prompt whose others are cached is a step of one row, and dumped."""
    save_model(tmp_path / "model", "Llama")
    engine = FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump", "--debug-tensor-dump-prefill-only",
                                    "--debug-tensor-dump-layers", "0", "2"))
    asked = question(13)
    for _ in range(2):
        engine.answers([asked])
    passes = passes_of(own_folder(tmp_path / "dump"))
    assert [each[INFO + "positions"].tolist() for each in passes] == [list(range(13)), [12]]
    for tensors in passes:
        layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
        assert layers == {"0", "2"} and {"model.embed_tokens", "lm_head"} <= set(tensors)


def test_answers_are_the_same(tmp_path):
    """Sums are computed where modules end, and the last layer computes all rows."""
    save_model(tmp_path / "model", "Llama")
    asked = [question(length, length) for length in (5, 30, 17)]
    flags = dump_flags(tmp_path / "model", tmp_path / "dump")
    plain = FlagEngine(*(flag for flag in flags if "dump" not in flag)).answers(asked)
    dumped = FlagEngine(*flags)
    assert [answer.tokens for answer in dumped.answers(asked)] == [answer.tokens for answer in plain]
    with_several = [each for each in passes_of(own_folder(tmp_path / "dump"))
                    if len(each[INFO + "extend_seq_lens"]) > 1]
    for tensors in with_several:
        assert len(tensors["model.layers.2"]) == tensors[INFO + "extend_seq_lens"].sum()
    assert with_several


def test_a_folder_of_another_server_and_layers_that_are_not_there(tmp_path):
    save_model(tmp_path / "model", "Llama")
    with pytest.raises(ConfigError, match="--debug-tensor-dump-layers names layer 3; the model's layers are 0 to 2"):
        FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump", "--debug-tensor-dump-layers", "1", "3"))
    own_folder(tmp_path / "dump").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has dumps of another server in .*: name another folder"):
        FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "file"))


def test_a_full_disk_ends_the_dumps_and_nothing_else(tmp_path, monkeypatch, caplog):
    save_model(tmp_path / "model", "Llama")
    engine = FlagEngine(*dump_flags(tmp_path / "model", tmp_path / "dump"))
    calls = []

    def save(tensors, path):
        calls.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_dump.torch, "save", save)
    assert len(engine.answers([question(20)])[0].tokens) == 4
    assert len(calls) == 1 and "No more tensors are dumped" in caplog.text


def test_without_the_flag_nothing_is_wrapped(tmp_path):
    save_model(tmp_path / "model", "Llama")
    engine = FlagEngine("--model-path", str(tmp_path / "model"), "--skip-tokenizer-init", *FLAGS)
    for call in engine.parts.runner._model.module_calls():
        wrapped = vars(call.owner).get(call.method)
        assert wrapped is None or call.method == "mlp_over_dp"


def test_steps_that_verify_drafts_are_dumped(tmp_path):
    """Each request's rows are its newest token and the drafts that it verifies."""
    asked = questions(2)
    drafting = (*BASE, *ROOMY, *algorithm_flags("EAGLE3"))
    plain = FlagEngine(*drafting).answers(asked)
    dumped = FlagEngine(*drafting, "--debug-tensor-dump-output-folder", str(tmp_path),
                        "--debug-tensor-dump-layers", "0")
    assert [answer.tokens for answer in dumped.answers(asked)] == [answer.tokens for answer in plain]
    prompts, *verified = passes_of(own_folder(tmp_path))
    assert prompts[INFO + "extend_seq_lens"].tolist() == [len(each.prompt) for each in asked]
    rows = num_drafts("EAGLE3") + 1
    assert verified[0][INFO + "extend_seq_lens"].tolist() == [rows, rows]
    assert len(verified[0]["lm_head"]) == len(verified[0]["model.layers.0"]) == 2 * rows


def first_pass(model: Path, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """What an engine dumps before it is asked anything."""
    FlagEngine(*dump_flags(model, folder, *more))
    [tensors] = passes_of(own_folder(folder))
    return tensors


def compared(folder: Path) -> dict[str, float]:
    found = json.loads((own_folder(folder) / "Compared.json").read_text())
    return {name: each["largest_difference"] for name, each in found.items()}


def test_token_ids_of_a_file_are_computed_at_start(tmp_path):
    model = save_model(tmp_path / "model", "Llama")
    prompts = np.random.default_rng(1).integers(8, 96, (2, 7))
    np.save(tmp_path / "ids.npy", prompts)
    flags = dump_flags(tmp_path / "model", tmp_path / "dump", "--debug-tensor-dump-input-file",
                       str(tmp_path / "ids.npy"))
    engine = FlagEngine(*flags)
    asked = question(9)
    plain = FlagEngine("--model-path", str(tmp_path / "model"), "--skip-tokenizer-init", *FLAGS)
    assert engine.answers([asked])[0].tokens == plain.answers([asked])[0].tokens, "no page of the file is read again"
    first = passes_of(own_folder(tmp_path / "dump"))[0]
    assert first[INFO + "extend_seq_lens"].tolist() == [7, 7]
    assert first[INFO + "input_ids"].tolist() == prompts.ravel().tolist()
    for row, prompt in enumerate(prompts):
        outputs = module_outputs(model, prompt.tolist())
        torch.testing.assert_close(first["model.layers.2"][7 * row:7 * row + 7], outputs["model.layers.2"],
                                   atol=TOLERANCE, rtol=0)
    assert not (own_folder(tmp_path / "dump") / "Compared.json").exists()


@pytest.mark.parametrize("family", ["Qwen3", "DeepseekV3", "Olmo2"])
def test_layers_take_their_input_from_a_dump(tmp_path, family, caplog):
    """Of a model whose second layer differs: without injection all layers after it do, with it that one alone."""
    more = ("--model-impl", "transformers") if family == "Olmo2" else ()
    maker = save_for_transformers if more else MAKERS[family]
    model = maker(tmp_path / "model", family)
    np.save(tmp_path / "ids.npy", np.arange(10, 22))
    given = ("--debug-tensor-dump-input-file", str(tmp_path / "ids.npy"), *more)
    first_pass(tmp_path / "model", tmp_path / "dump", *given)
    dump = next(own_folder(tmp_path / "dump").glob("Pass*.pt"))
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.o_proj.weight
        weight.copy_(weight.flip(0))
    model.save_pretrained(tmp_path / "changed")
    given = ("--debug-tensor-dump-input-file", str(dump), *more)
    with caplog.at_level("INFO"):
        first_pass(tmp_path / "changed", tmp_path / "whole", *given)
    assert "the farthest: " in caplog.text
    first_pass(tmp_path / "changed", tmp_path / "single", *given, "--debug-tensor-dump-inject")
    whole, single = compared(tmp_path / "whole"), compared(tmp_path / "single")
    layers = [f"model.layers.{number}" for number in range(3)]
    assert [whole[name] > 1e-3 for name in layers] == [False, True, True]
    assert [single[name] > 1e-3 for name in layers] == [False, True, False]


def test_input_files_that_do_not_fit(tmp_path):
    save_model(tmp_path / "model", "Llama")
    np.save(tmp_path / "far.npy", np.array([1, 5000]))
    np.save(tmp_path / "long.npy", np.arange(60) + 8)
    np.save(tmp_path / "half.npy", np.array([0.5]))
    (tmp_path / "other.pt").write_text("nothing of torch")
    torch.save({INFO + "input_ids": torch.arange(3), INFO + "positions": torch.arange(3) + 16}, tmp_path / "later.pt")
    torch.save({INFO + "input_ids": torch.arange(9, 12), INFO + "positions": torch.arange(3),
                "model.layers.0": torch.zeros(3, 5)}, tmp_path / "small.pt")
    for name, sentence in {"none.npy": "Cannot read .*none.npy: No such file", "far.npy": "beyond the model's",
                           "long.npy": "has 60 tokens, too many for a step: raise --chunked-prefill-size",
                           "half.npy": "must have one token id or more", "other.pt": "Cannot read .*: [A-Z]",
                           "later.pt": "a step that follows others",
                           "small.pt": "model.layers.0 of shape \\[3, 5\\], and the model's is"}.items():
        inject = ("--debug-tensor-dump-inject",) if name == "small.pt" else ()
        with pytest.raises(ConfigError, match=sentence):
            first_pass(tmp_path / "model", tmp_path / name.replace(".", ""), "--debug-tensor-dump-input-file",
                       str(tmp_path / name), *inject)
