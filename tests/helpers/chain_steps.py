"""Chain steps on a CPU: a recorder that runs its work again, and steps of requests, by chains or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from baton.common.api.drafts import Drafts
from baton.common.api.messages import Generate
from baton.common.api.sampling import SamplingParams
from baton.common.forward.chain_rows import ChainRows
from baton.common.forward.forward_batch import NO_COLUMNS, indptr_of
from baton.common.request.req import Req
from baton.common.request.sampling_metadata import SamplingMetadata
from baton.common.request.step_input import Chunk, DraftPlan, StepInput, StepTokens, chunk_step
from baton.common.request.step_output import StepOutput


class Again:
    """Records by computing once more into the tensors of the first time."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        held = work()

        def replay() -> None:
            for old, made in zip(tensors_in(held), tensors_in(work()), strict=True):
                old.copy_(made)
            self.num_replays += 1

        return held, replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple):
        for part in found:
            yield from tensors_in(part)


class Chats:
    """Requests that decode on an engine's parts, stepped by hand. The ``outputs`` of each are its tokens and drafts,
    step by step."""

    def __init__(self, engine: Any, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams],
                 num_drafts: int, room: int = 400, **fields: Any):
        self.engine, self.num_drafts = engine, num_drafts
        self.page_size = engine.cache.page_size
        self.outputs: list[list[tuple[list[int], Drafts | None]]] = [[] for _ in prompts]
        self.reqs = [self._start(str(number), prompt, params, room, fields)
                     for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))]
        self.in_flight: list[tuple[list[int], Any]] = []
        self.sources: dict[int, int] = {}
        self.last: StepInput | None = None
        step = chunk_step([Chunk(req, 0, req.tokens.count, True) for req in self.reqs], len(self.reqs), self.page_size,
                          None, DraftPlan({}, np.zeros(len(self.reqs), np.int64), [num_drafts] * len(self.reqs)))
        self._take(range(len(self.reqs)), engine.executor.launch(step).wait())

    def _start(self, rid: str, prompt: Sequence[int], params: SamplingParams, room: int, fields: Any) -> Req:
        req = Req.from_message(Generate(rid, list(prompt), params, **fields), eos_ids=frozenset(), now=0.0, timeout=1.0)
        req.page_table = self.engine.cache.new_private_table()
        assert self.engine.cache.allocate_next(req.page_table, room)
        return req

    def _take(self, chosen: Sequence[int], output: StepOutput) -> None:
        begin = 0
        for place, count in zip(output.req_index, output.counts):
            req, tokens = self.reqs[chosen[place]], output.tokens[begin:begin + count]
            begin += count
            for token in tokens:
                req.append_token(token)
            req.drafts = output.drafts.get(place)
            if output.chain_drafts and output.chain_drafts[place]:
                req.drafts = Drafts(tuple(output.chain_drafts[place]))
            self.outputs[chosen[place]].append((tokens, req.drafts))
        self.extras = output.extras

    def eager(self, chosen: Sequence[int], num_drafts: int | None = None) -> None:
        """A step of the ``chosen`` requests, which verifies and drafts up to ``num_drafts`` tokens."""
        self.synchronize()
        most = self.num_drafts if num_drafts is None else num_drafts
        drafts, counts = self._known(chosen, most, None)
        chunks = [Chunk(self.reqs[i], self.reqs[i].tokens.count - 1, self.reqs[i].tokens.count, True) for i in chosen]
        step = chunk_step(chunks, 0, self.page_size, None, DraftPlan(drafts, counts, [most] * len(chosen)))
        self._take(chosen, self.engine.executor.launch(step).wait())

    def _known(self, chosen: Sequence[int], most: int, limits: Sequence[int] | None) -> tuple[dict[int, Drafts],
                                                                                              np.ndarray]:
        found = {}
        for place, index in enumerate(chosen):
            req = self.reqs[index]
            room = most if limits is None else min(most, limits[place] - req.tokens.count)
            if req.drafts is not None and (first := req.drafts.first(room)) is not None:
                found[place] = first
        return found, np.array([len(found.get(place, ())) for place in range(len(chosen))], np.int64)

    def chain(self, chosen: Sequence[int], num_drafts: int | None = None, *, limits: Sequence[int] | None = None,
              known: Sequence[int] = ()) -> None:
        """The same as a chain step. Requests of the step in flight follow it, but those in ``known`` (which must not be
        in it). ``limits`` by request."""
        most = self.num_drafts if num_drafts is None else num_drafts
        width, count = most + 1, len(chosen)
        sources = np.array([self.sources.get(index, -1) for index in chosen], np.int64)
        drafts, counts = self._known(chosen, most, limits)
        tokens = np.zeros((count, width), np.int64)
        for place, index in enumerate(chosen):
            tokens[place, 0] = self.reqs[index].tokens.view(self.reqs[index].tokens.count - 1)[0]
            own = drafts.get(place)
            if own is not None:
                tokens[place, 1:1 + len(own)] = own.tokens
        positions = np.array([self.reqs[index].tokens.count - 1 for index in chosen], np.int64)
        ids = [self.reqs[index].page_table.ids for index in chosen]
        indptr = indptr_of([len(each) for each in ids])
        tokens[sources >= 0], positions[sources >= 0] = -7, 0  # which the device knows better
        chains = ChainRows(width, sources, positions, tokens, counts,
                           np.array(limits if limits is not None else [1 << 20] * count, np.int64), indptr,
                           np.concatenate(ids).astype(np.int32), None, self.last.number if self.last else 0)
        reqs = [self.reqs[index] for index in chosen]
        extra = [place for place, req in enumerate(reqs) if req.extras]
        rows = counts if extra else 0 * counts
        sampling = [SamplingMetadata(req.sampling, position + 1 + row) for req, position, number
                    in zip(reqs, positions.tolist(), rows.tolist()) for row in range(number + 1)]
        step = StepInput(reqs, NO_COLUMNS, positions, 1 + rows, 1 + rows, StepTokens(None), list(range(count)),
                         sampling, extra, all(req.sampling.greedy for req in reqs), 0, drafts if extra else {},
                         chains=chains)
        launched = self.engine.executor.launch(step)
        self.synchronize()
        self.in_flight = [(list(chosen), launched)]
        self.sources = {index: place for place, index in enumerate(chosen)}
        self.last = step

    def synchronize(self) -> None:
        """Takes the results of the step in flight."""
        for chosen, launched in self.in_flight:
            self._take(chosen, launched.wait())
        self.in_flight, self.sources = [], {}

    def close(self) -> None:
        """Frees the pages."""
        self.synchronize()
        for req in self.reqs:
            assert req.page_table is not None
            self.engine.cache.release(req.page_table)
