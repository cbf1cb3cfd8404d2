"""Greedy answers of a transformers model to tinychat's tasks, and how many of them are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tasks import Example, matches
from .tokenizer import render


@dataclass
class Score:
    """Right answers of one task, and the wrong ones to look at: ``(example, answer)``."""

    right: int = 0
    wrong: list[tuple[Example, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.right + len(self.wrong)

    @property
    def share(self) -> float:
        return self.right / self.total if self.total else 0.0


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], *,
          batch_size: int = 64, max_new_tokens: int = 192) -> dict[str, Score]:
    """Answer ``examples`` greedily, in batches of similar length, and score them by task."""
    prompts = [render(tokenizer, example, answered=False) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: len(prompts[i]))
    scores: dict[str, Score] = {}
    generate: Any = model.generate  # mypy takes it for the module's attribute, a tensor
    for start in range(0, len(order), batch_size):
        chosen = order[start:start + batch_size]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, padding_side="left",
                           return_token_type_ids=False).to(model.device)
        with torch.inference_mode():
            output = generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
        for i, answer in zip(chosen, answers):
            task_score = scores.setdefault(examples[i].task, Score())
            if matches(examples[i], answer):
                task_score.right += 1
            else:
                task_score.wrong.append((examples[i], answer))
    return scores


def table(scores: dict[str, Score]) -> str:
    """A Markdown table of exact match by task, with the total last."""
    right, total = sum(s.right for s in scores.values()), sum(s.total for s in scores.values())
    rows = [f"| {task} | {s.right} / {s.total} | {s.share:.1%} |" for task, s in sorted(scores.items())]
    return "\n".join(["| task | right | exact match |", "|---|---|---|", *rows,
                      f"| all | {right} / {total} | {right / total:.1%} |"])
