"""``calibrate_double_sparsity``: channels by their magnitude, as transformers computes queries and keys."""

import json
import re

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from baton.calibrate_double_sparsity import main
from baton.common.calibration.channel_args import CalibrateDoubleSparsity
from baton.common.calibration.heavy_channels import heavy_channels
from baton.common.config.cli import build
from baton.common.config.server import SparsityArgs
from baton.common.tinychat import CHECKPOINT
from baton.common.tokenizer.tokenizer import load_tokenizer
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_model


def magnitudes(model, blocks):
    """The mean magnitudes of layer 1, by transformers."""
    attention = model.model.layers[1].self_attn
    found = {"q": 0, "k": 0, "qk": 0}
    for block in blocks:
        seen = {}

        def see(module, inputs, out, seen=seen):
            seen["q" if module is attention.q_norm else "k"] = out.transpose(1, 2)

        hooks = [norm.register_forward_hook(see) for norm in (attention.q_norm, attention.k_norm)]
        ids = torch.tensor([block])
        with torch.no_grad():
            model(ids)
            cos_sin = model.model.rotary_emb(seen["q"], torch.arange(len(block))[None])
        q, k = (x[0] for x in apply_rotary_pos_emb(seen["q"], seen["k"], *cos_sin))
        for name, rows in (("q", q), ("k", k), ("qk", q * k.repeat_interleave(2, 0))):
            found[name] = found[name] + rows.abs().sum(1)
        for hook in hooks:
            hook.remove()
    return found


def test_channels_stand_by_their_magnitude(tmp_path):
    model = save_model(tmp_path, "Qwen3")
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 131, count).tolist() for count in (40, 40, 9)]
    config = build(CalibrateDoubleSparsity, {"text_file": "", "output_file": "", "model_path": str(tmp_path),
                                             "device": "cpu"})
    found = heavy_channels(config, blocks)
    assert len(found) == 9
    for kind, want in magnitudes(model, blocks).items():
        ordered = want.gather(-1, torch.tensor(found[f"model.layers.1.self_attn.{kind}_proj"]))
        assert len(ordered) == (2 if kind == "k" else 4)
        assert (ordered.diff(dim=-1) <= 1e-4 * want.amax()).all()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The packaged model's channels, from a page of its documentation."""
    folder = tmp_path_factory.mktemp("channels")
    text, output = folder / "text.txt", folder / "channels.json"
    text.write_text((CHECKPOINT / "MODEL.md").read_text(), encoding="utf-8")
    main(["--model-path", "tinychat", "--device", "cpu", "--text-file", str(text), "--output-file", str(output),
          "--num-samples", "3", "--block-size", "300"])
    return output


def reversed_channels(path, folder):
    """The same file with the lightest channels first."""
    content = {name: [order[::-1] for order in heads] for name, heads in json.loads(path.read_text()).items()}
    (folder / "reversed.json").write_text(json.dumps(content))
    return folder / "reversed.json"


TURNS = [("What is the capital of Japan?", "The capital of Japan is Tokyo."), ("Thank you!", "You are welcome.")] * 6
QUESTIONS = ["What is the capital of France?", "What is 7 plus 5?", "Who are you?", "Count from one to ten."]


def test_calibrated_channels_keep_the_answers_of_tinychat(calibrated, tmp_path):
    """With half of the channels and less than half of the tokens; by the lightest channels answers are others."""
    tokenizer = load_tokenizer("tinychat")
    before = [{"role": role, "content": text} for turn in TURNS for role, text in zip(("user", "assistant"), turn)]
    prompts = [tokenizer.encode(tokenizer.render_chat(
        [*before, {"role": "user", "content": question}], tools=None, continue_final_message=False, options={}),
        add_special_tokens=False) for question in QUESTIONS]
    assert all(len(prompt) > 200 for prompt in prompts)

    def answers(args=None):
        engine = Engine(CHECKPOINT, page_size=16, max_total_tokens=4096, sparsity=args)
        for i, prompt in enumerate(prompts):
            engine.start(str(i), prompt, max_new_tokens=24)
        return tokens_of(engine.run())

    def sparse(path):
        return answers(SparsityArgs(True, str(path), 32, 96, "qk", 100))

    dense = answers()
    assert sparse(calibrated) == dense
    assert sparse(reversed_channels(calibrated, tmp_path)) != dense


def test_files_are_checked(tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("Some words. " * 50)
    flags = ["--model-path", "tinychat", "--device", "cpu", "--output-file", str(tmp_path / "out")]
    for more, sentence in (
            (["--text-file", str(tmp_path / "none")], "--text-file .*none cannot be read"),
            (["--text-file", str(tmp_path / "empty")], "has no text: choose one with some thousand words"),
            (["--text-file", str(tmp_path / "text"), "--output-file", str(tmp_path / "no" / "out")], "cannot be writ"),
            (["--text-file", str(tmp_path / "text"), "--num-samples", "0"], "--num-samples must be 1 or more"),
            (["--text-file", str(tmp_path / "text"), "--context-length", "64"], "--block-size .* must be 64 or less")):
        with pytest.raises(SystemExit):
            main([*flags, *more])
        assert re.search(sentence, capsys.readouterr().err)
