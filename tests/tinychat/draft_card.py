"""MODEL.md of tinychat's draft models: how they were trained, and how much of what they draft the target accepts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.speculative_reference import Target, load_drafter, plain, step_lengths

from . import tasks
from .tokenizer import render

MOST_DRAFTS = 5
MAX_NEW_TOKENS = 96

_WHAT = {
    "eagle3": "An EAGLE3 head for tinychat, in SpecForge's layout. It reads the states that enter layers 2, 3 and 4, "
              "and drafts among the 1,280 tokens that assistants say most.",
    "nextn": "A layer of multi-token prediction for tinychat, with Qwen3's blocks and the names of DeepSeek-V3's "
             "tensors. It reads the states after the final norm; embedding and LM head are tinychat's.",
    "draft": "A Qwen3 model of two layers with tinychat's vocabulary, which drafts from tokens alone. Its tokenizer is "
             "tinychat's."}


def walked(lengths: Sequence[int], drafts: int) -> tuple[int, int]:
    """Steps and tokens of an answer with ``drafts`` drafts a step, of the lengths of steps with more."""
    steps = known = 0
    while known < len(lengths):
        steps, known = steps + 1, known + min(lengths[known], drafts + 1)
    return steps, known


def acceptance(folder: Path, count: int) -> dict[str, list[float]]:
    """Mean tokens of a verify step with 1 to ``MOST_DRAFTS`` drafts by task and for "all", greedy, in float32; of
    ``count`` held-out examples of each task."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    target = Target(CHECKPOINT, torch.float32)
    drafter = load_drafter(folder, target)
    totals: dict[str, list[list[int]]] = {}
    for example in tasks.held_out(count * len(tasks.TASKS), seed=1):
        prompt = tokenizer.backend_tokenizer.encode(render(tokenizer, example, answered=False)).ids
        lengths = step_lengths(target, drafter, prompt, plain(target, prompt, MAX_NEW_TOKENS), MOST_DRAFTS)
        for name in (example.task, "all"):
            sums = totals.setdefault(name, [[0, 0] for _ in range(MOST_DRAFTS)])
            for drafts, pair in enumerate(sums):
                steps, tokens = walked(lengths, drafts + 1)
                pair[0], pair[1] = pair[0] + steps, pair[1] + tokens
    return {name: [tokens / max(1, steps) for steps, tokens in sums] for name, sums in sorted(totals.items())}


def write_card(folder: Path, trained: str, count: int) -> None:
    """Write MODEL.md of ``folder``, whose name is the kind of draft model; ``trained``: by what command, when."""
    table = acceptance(folder, count)
    overall = table.pop("all")
    rows = [f"| {name} | " + " | ".join(f"{length:.2f}" for length in lengths) + " |"
            for name, lengths in [*table.items(), ("all", overall)]]
    head = ["| task | " + " | ".join(f"k = {k}" for k in range(1, MOST_DRAFTS + 1)) + " |", "|---" * 6 + "|"]
    text = "\n".join([
        f"# tinychat-{folder.name}", "", _WHAT[folder.name], "", *trained.splitlines(), "", "## Acceptance length", "",
        f"Mean tokens of a verify step with k drafts, the target's own among them, over {count} held-out examples of",
        "each task: greedy, float32, by the loop of `tests/helpers/speculative_reference.py`. Short answers end within",
        "a step.", "", *head, *rows, ""])
    (folder / "MODEL.md").write_text(text, encoding="utf-8")
