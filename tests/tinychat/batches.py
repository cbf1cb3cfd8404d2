"""Training batches: dialogues written and packed by worker processes, replayed from a pool on the device."""

from __future__ import annotations

import multiprocessing
import os
import queue
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from . import tasks
from .tokenizer import END_OF_TEXT, TURN_END, TURN_START, render

ROW_TOKENS = 2304
"""Tokens of a packed row: the longest dialogue (about 2,000 tokens) and room for short ones beside it."""

_DIALOGUES_PER_CHUNK = 512
_MISSING = -1


@dataclass(frozen=True)
class Rows:
    """Packed rows, each array ``[rows, ROW_TOKENS]``.

    ``document`` numbers the dialogues of a row (padding has its own number), ``position`` counts within
    a dialogue, and ``target`` is the token to predict there, or -1 where nothing is learned: only the
    assistant's words and its end of turn are.
    """

    tokens: np.ndarray
    document: np.ndarray
    position: np.ndarray
    target: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Rows:
        return cls(*(np.full((rows, ROW_TOKENS), fill, dtype=np.int16) for fill in (0, _MISSING, 0, _MISSING)))

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.document, self.position, self.target


class Packer:
    """Turns examples into rows, with a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        ids = tokenizer.get_vocab()
        self._turn_start, self._turn_end, self._padding = ids[TURN_START], ids[TURN_END], ids[END_OF_TEXT]
        self._assistant = ids["assistant"]

    def rows(self, examples: list[tasks.Example]) -> Rows:
        """Pack examples first-fit, longest first, so that little of a row is padding."""
        encoded = [ids for ids, _ in self.encoded(examples)]
        encoded.sort(key=len, reverse=True)
        bins: list[list[np.ndarray]] = []
        room: list[int] = []
        for ids in encoded:
            assert len(ids) <= ROW_TOKENS, f"a dialogue of {len(ids)} tokens does not fit a row of {ROW_TOKENS}"
            place = next((i for i, free in enumerate(room) if free >= len(ids)), None)
            if place is None:
                bins.append([])
                room.append(ROW_TOKENS)
                place = len(bins) - 1
            bins[place].append(ids)
            room[place] -= len(ids)
        return self._fill(bins)

    def encoded(self, examples: list[tasks.Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of each dialogue, and the token to predict at each of them (-1: nothing is learned there)."""
        texts = [render(self._tokenizer, example, answered=True) for example in examples]
        encoded = [np.array(item.ids, dtype=np.int16) for item in self._tokenizer.backend_tokenizer.encode_batch(texts)]
        return [(ids, self._targets(ids)) for ids in encoded]

    def _fill(self, bins: list[list[np.ndarray]]) -> Rows:
        rows = Rows.empty(len(bins))
        rows.tokens[:] = self._padding
        for row, documents in enumerate(bins):
            at = 0
            for number, ids in enumerate(documents):
                span = slice(at, at + len(ids))
                rows.tokens[row, span] = ids
                rows.document[row, span] = number
                rows.position[row, span] = np.arange(len(ids))
                rows.target[row, span] = self._targets(ids)
                at += len(ids)
        return rows

    def _targets(self, ids: np.ndarray) -> np.ndarray:
        """The next token wherever it belongs to an assistant's turn, else -1. Shape: that of ``ids``."""
        targets = np.full_like(ids, _MISSING)
        ends = np.flatnonzero(ids == self._turn_end)
        for header in np.flatnonzero((ids[:-1] == self._turn_start) & (ids[1:] == self._assistant)):
            newline = header + 2
            end = ends[np.searchsorted(ends, newline)]
            targets[newline:end] = ids[newline + 1:end + 1]
        return targets


def _write_rows(tokenizer: PreTrainedTokenizerFast, seed: int, out: multiprocessing.Queue) -> None:
    """Body of a worker process: training rows without end, of its own seed."""
    packer, stream = Packer(tokenizer), tasks.stream(seed)
    while True:
        out.put(packer.rows(list(islice(stream, _DIALOGUES_PER_CHUNK))))


class ReplayPool:
    """The newest training rows, on the device, sampled with replacement.

    Decouples the trainer from the writers: when they are slower than the GPU, rows are seen a few
    times instead of the GPU waiting.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, device: torch.device, *, workers: int, seed: int,
                 capacity: int = 100_000):
        self._capacity = capacity
        self.rows_written = 0
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the workers already fill the cores
        # Forked, before the device is touched: spawned, 15 workers needed 70 s to import transformers from a cold disk.
        context = multiprocessing.get_context("fork")
        self._chunks: multiprocessing.Queue = context.Queue(maxsize=4 * workers)
        self._workers = [context.Process(target=_write_rows, args=(tokenizer, seed * 1000 + number, self._chunks),
                                         daemon=True) for number in range(workers)]
        for worker in self._workers:
            worker.start()
        self._stored = torch.empty((4, capacity, ROW_TOKENS), dtype=torch.int16, device=device)

    def wait_for(self, rows: int) -> None:
        """Block until ``rows`` rows have been written."""
        while self.rows_written < rows:
            self._store(self._chunks.get(timeout=120))

    def batch(self, rows: int) -> torch.Tensor:
        """``[4, rows, ROW_TOKENS]`` int64: tokens, document, position, target of random stored rows."""
        try:
            while True:
                self._store(self._chunks.get_nowait())
        except queue.Empty:
            pass
        filled = min(self.rows_written, self._capacity)
        chosen = torch.randint(filled, (rows,), device=self._stored.device)
        return self._stored[:, chosen].long()

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()

    def _store(self, rows: Rows) -> None:
        block = torch.from_numpy(np.stack(rows.arrays()))
        at = torch.arange(self.rows_written, self.rows_written + block.shape[1]) % self._capacity
        self._stored[:, at.to(self._stored.device)] = block.to(self._stored.device)
        self.rows_written += block.shape[1]
