"""Logit processors that tests name by import path."""

from __future__ import annotations

import threading

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


class Alternates:
    """Forbids, by turns of its own count, even and odd tokens, and the newest token; keeps all in its parameters."""

    def __call__(self, logits, params):
        for row, given in enumerate(params):
            state = given.setdefault("state", {"turn": 0, "seen": []})
            logits[row, state["turn"] % 2::2] = float("-inf")
            output = given["__req__"].output_ids
            assert len(output) >= len(state["seen"]) and output[:len(state["seen"])] == state["seen"]
            state["seen"] = output
            if output:
                logits[row, output[-1]] -= 3.0
            state["turn"] += 1 + (len(output) > 4)
        return logits


class FailsAtLength:
    """Raises for outputs of ``length`` tokens."""

    def __call__(self, logits, params):
        if any(len(given["__req__"].output_ids) == given["length"] for given in params):
            raise RuntimeError("as asked")
        return logits


class KeepsLock:
    """Keeps a lock in its parameters, which cannot be copied."""

    def __call__(self, logits, params):
        for given in params:
            given["lock"] = threading.Lock()
        return logits
