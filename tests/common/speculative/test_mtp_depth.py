"""Several layers of multi-token prediction: the slots of deeper layers hold the drafts of their step, of which some are
rejected later. This test measures what that costs, against requests that are computed anew before each step."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from baton.common.tinychat import DRAFT_MODELS
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, lengths_computed_anew, questions
from baton.tests.helpers.flag_engine import FlagEngine

FIRST_LAYER, DEPTH, STEPS = 7, 2, 4


def save_deeper(folder):
    """Saves tinychat's layer several times, as layers that draft one token each."""
    shutil.copytree(DRAFT_MODELS["tinychat-nextn"], folder)
    file = folder / "model.safetensors"
    tensors = {name.replace(f"layers.{FIRST_LAYER}.", f"layers.{FIRST_LAYER + layer}."): tensor.clone()
               for name, tensor in load_file(file).items() for layer in range(DEPTH)}
    file.unlink()
    save_file(tensors, file)


@pytest.mark.slow
def test_rejected_tokens_in_deeper_layers_cost_less_than_two_percent_of_acceptance(tmp_path):
    save_deeper(tmp_path / "nextn")
    flags = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(STEPS),
             "--speculative-draft-model-path", str(tmp_path / "nextn")]
    asked = questions(40)
    engine = FlagEngine(*BASE, *ROOMY, *flags)
    assert engine.parts.runner.draft_model.network.depth == DEPTH
    answers = engine.answers(asked)
    pairs = [(length, anew[known]) for answer, anew in zip(answers, lengths_computed_anew(flags, STEPS, asked, answers))
             for known, drafts, length in answer.verified if drafts == STEPS]
    found, right = (sum(lengths) for lengths in zip(*pairs))
    assert len(pairs) > 150 and 0.98 * right < found < 1.01 * right, (found, right, len(pairs))
