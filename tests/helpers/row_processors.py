"""Logit processors that tests name by import path."""

from __future__ import annotations

import torch


def flip(logits, params):
    return -logits


class Remembers:
    """Writes into a file which tokens it was told of, and counts in its own parameters."""

    def __call__(self, logits, params):
        for given in params:
            given["steps"] = given.get("steps", 0) + 1
            seen = given["__req__"]
            with open(given["file"], "a") as file:
                print(given["steps"], seen.origin_input_ids, seen.output_ids, file=file, sep=";")
        return logits


def fails_late(logits, params):
    """Raises in steps in which a row has three tokens of output and asks for it; changes all logits before."""
    logits.zero_()
    if any(given.get("fails") and len(given["__req__"].output_ids) == 3 for given in params):
        raise RuntimeError("as asked")
    logits[:, 7] = 1.0
    return logits


def narrows(logits, params):
    return logits[:, :5]


def answers_nothing(logits, params):
    logits[:, 0] = 5.0


class NeedsArguments:
    def __init__(self, value):
        self.value = value


number = torch.tensor(3)
