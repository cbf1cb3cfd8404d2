"""Training batches for draft models: dialogues of similar length side by side, and the target's states of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import tasks
from .batches import Packer

BATCH_TOKENS = 4096
"""Most tokens of a batch, padding included."""

CHUNK_DIALOGUES = 1536
"""Dialogues that are sorted by length together, so that little of a batch is padding."""

LONG_TOKENS = 320
LONG_SHARE = 0.2
"""This share of the dialogues longer than ``LONG_TOKENS`` is learned from: they cost most and have few answers."""


@dataclass(frozen=True)
class Rows:
    """The ``N`` positions i of a batch of which token i + 1 and token i + 2 are both an assistant's, in order.

    ``dialogue`` [N] and ``position`` [N] locate each, ``slot`` [N] counts within its dialogue, in which are at most
    ``width``; ``adjacent`` [N] is true where the row before is the position before, of the same dialogue.
    """

    dialogue: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    adjacent: torch.Tensor
    width: int

    @classmethod
    def of(cls, targets: np.ndarray, device: torch.device) -> Rows:
        known = targets >= 0
        dialogue, position = map(torch.from_numpy, np.nonzero(known[:, :-1] & known[:, 1:]))
        counts = torch.bincount(dialogue, minlength=len(targets))
        slot = torch.arange(len(dialogue)) - (counts.cumsum(0) - counts)[dialogue]
        adjacent = F.pad((dialogue.diff() == 0) & (position.diff() == 1), (1, 0))
        return cls(dialogue.to(device), position.to(device), slot.to(device), adjacent.to(device), int(counts.max()))

    def take(self, values: torch.Tensor, later: int = 0) -> torch.Tensor:
        """``[N, ...]`` of ``values`` [B, L, ...], each ``later`` positions after its row."""
        return values[self.dialogue, self.position + later]


@dataclass(frozen=True)
class Batch:
    """Dialogues padded on the right: ``B`` of them, of ``L`` tokens.

    ``features`` [B, L, 3 hidden] enter layers 2, n // 2 and n - 3, ``last`` [B, L, hidden] leave the final norm, and
    ``wanted`` [N, vocabulary] are the target's logits of token i + 2.
    """

    tokens: torch.Tensor
    rows: Rows
    features: torch.Tensor
    last: torch.Tensor
    wanted: torch.Tensor


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE3's: a low, a middle and a high layer, whose inputs the head reads."""
    return 2, num_layers // 2, num_layers - 3


class TargetStates:
    """Runs the target over batches."""

    def __init__(self, model: Qwen3ForCausalLM):
        self._model = model
        self._layers = feature_layers(model.config.num_hidden_layers)

    @torch.no_grad()
    def batch(self, tokens: torch.Tensor, targets: np.ndarray) -> Batch:
        """``tokens`` [B, L] int64; ``targets`` [B, L]: the next token where it is an assistant's, else -1."""
        output = self._model.model(tokens, use_cache=False, output_hidden_states=True)
        rows = Rows.of(targets, tokens.device)
        features = torch.cat([output.hidden_states[layer] for layer in self._layers], dim=-1)
        wanted = self._model.lm_head(rows.take(output.last_hidden_state, later=1))
        return Batch(tokens, rows, features, output.last_hidden_state, wanted)


class Dialogues:
    """Dialogues of a seed as ids, in chunks of padded arrays ``tokens`` and ``targets``, each ``[B, L]``."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int):
        self._packer = Packer(tokenizer)
        self._examples = tasks.stream(seed)
        self._random = random.Random(seed)

    def chunk(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The next dialogues, batches of similar length in random order."""
        pairs = self._packer.encoded(list(islice(self._examples, CHUNK_DIALOGUES)))
        pairs = [pair for pair in pairs if len(pair[0]) <= LONG_TOKENS or self._random.random() < LONG_SHARE]
        pairs.sort(key=lambda pair: len(pair[0]))
        batches, group = [], []
        for pair in pairs:
            if group and len(pair[0]) * (len(group) + 1) > BATCH_TOKENS:
                batches.append(self._padded(group))
                group = []
            group.append(pair)
        batches.append(self._padded(group))
        self._random.shuffle(batches)
        return batches

    @staticmethod
    def _padded(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        longest = len(pairs[-1][0])
        tokens, targets = np.zeros((len(pairs), longest), np.int64), np.full((len(pairs), longest), -1, np.int64)
        for index, (ids, target) in enumerate(pairs):
            tokens[index, :len(ids)], targets[index, :len(ids)] = ids, target
        return tokens, targets


def batches(dialogues: Dialogues, states: TargetStates, replays: int, device: torch.device) -> Iterator[Batch]:
    """Batches without end: each chunk's are computed once and come ``replays`` times."""
    while True:
        computed = [states.batch(torch.from_numpy(tokens).to(device), targets) for tokens, targets in dialogues.chunk()]
        for _ in range(replays):
            yield from computed
