"""Chain steps as CUDA graphs: requests whose drafts, positions and newest tokens the host need not know.

A step is two graphs, with sampling between them: one places the rows and computes the model, the other accepts drafts,
and drafts anew. Each pair is captured for a number of requests and of drafts, with static inputs that all pairs share;
a step is padded to the next size. Rows without a token, and requests that pad, are void: they are stored in the scratch
page, or in slots that later tokens overwrite.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ....kernels.arguments import ChainPages, ChainState, KnownChains, PlacedChains, SimulatedCounts
from ....kernels.sampling.argmax import argmax
from ....kernels.speculative.accept_chains import accept_chains
from ....kernels.speculative.place_chains import place_chains
from ...attention.base import AttentionPlanner
from ...attention.workspace import AttentionWorkspace
from ...forward.chain_batches import ChainBatches
from ...forward.chain_rows import ChainRows
from ...forward.step_context import StepContext
from ...models.decoder.causal_lm import CausalLM
from ...speculative.base import ChainDrafter, ChainSampler, ChainStep, Features
from .capture_profile import captured_size
from .chain_inputs import ChainInputs
from .piecewise_graphs import Recorder, Replay

_STEPS_AHEAD = 4
"""Steps of whose tokens the host's positions may lack those after the first; bounds the pages of a request."""


class ChainModel(NamedTuple):
    """The model, and the drafter that reads ``features`` of it, if any."""

    model: CausalLM
    attention: AttentionPlanner
    workspace: AttentionWorkspace
    drafter: ChainDrafter
    features: Features | None


class ChainPool(NamedTuple):
    """The pool of chain steps: requests have up to ``max_length`` tokens; nothing reads ``scratch_page``."""

    page_size: int
    scratch_page: int
    max_length: int


class DraftSamplers(Protocol):
    """Makes the samplers of drafts of captured steps."""

    def __call__(self, size: int, greedy: bool) -> ChainSampler:
        """Returns the sampler of a step of ``size`` requests; ``greedy``: all of them are."""


class Verified(NamedTuple):
    """The rows of a step of B requests that the model has computed: ``logits`` [B * width, V]. ``samples``
    [B * width] int64 have the argmax; tokens that are sampled otherwise, negative ones where a row has failed, are to
    be written there. ``placed`` has ``size`` requests, of which the last pad the step. ``result`` [B * columns] is the
    ChainState's ``packed`` after ``draft``."""

    size: int
    width: int
    placed: PlacedChains
    logits: torch.Tensor
    samples: torch.Tensor
    result: torch.Tensor


class _Graphs(NamedTuple):
    """The graphs of a size and width; ``draft`` has one for requests that are all greedy, and one for others: the same
    where nothing is drafted. They read tensors of ``placed`` and ``batches``, which must live as long."""

    verify: Replay
    draft: dict[bool, Replay]
    logits: torch.Tensor
    placed: PlacedChains
    batches: ChainBatches


class ChainGraphs:
    """Records at construction; ``verify`` and then ``draft`` replay a step. ``sizes``: those of each number of drafts.
    ``progress`` is called with the fraction done."""

    def __init__(self, parts: ChainModel, pool: ChainPool, sizes: Mapping[int, Sequence[int]], recorder: Recorder,
                 samplers: DraftSamplers, simulated: SimulatedCounts | None, progress: Callable[[float], None]):
        """``simulated`` has a key for each request of the largest step; None: no acceptance is simulated."""
        self._parts = parts
        self._pool = pool
        self._sizes = {num_drafts + 1: sorted(each) for num_drafts, each in sizes.items()}
        self._recorder = recorder
        self._samplers = samplers
        self._simulated = simulated
        widest, largest = max(self._sizes), max(each[-1] for each in self._sizes.values())
        most_rows = max(each[-1] * width for width, each in self._sizes.items())
        device = parts.model.device
        pages = -(-(pool.max_length + (_STEPS_AHEAD + 2) * widest) // pool.page_size)
        self._inputs = ChainInputs(largest, most_rows, largest * pages, pool.scratch_page,
                                   -(-2 * widest // pool.page_size), device)
        self.state = ChainState.empty(largest, widest - 1, device)
        self._samples = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], _Graphs] = {}
        self._views: dict[tuple[int, int, int], Verified] = {}
        pairs = [(size, width) for width, each in self._sizes.items() for size in each]
        # The largest first: the smaller ones then fit into its memory.
        for done, (size, width) in enumerate(sorted(pairs, key=lambda pair: -pair[0] * pair[1]), 1):
            with captured_size(f"steps of {width - 1} drafts", size):
                self._record(size, width)
            progress(done / len(pairs))

    def verify(self, chains: ChainRows) -> Verified:
        """Replays the model of a step; the next step overwrites the results."""
        sizes, count = self._sizes[chains.width], chains.num_reqs
        size = sizes[bisect_left(sizes, count)]
        self._inputs.fill(chains, size)
        self._graphs[size, chains.width].verify()
        return self._view(size, chains.width, count)

    def draft(self, verified: Verified, *, greedy: bool) -> None:
        """Replays the rest of the step, whose samples are written: it accepts and drafts, and leaves the result."""
        self._graphs[verified.size, verified.width].draft[greedy]()

    def _view(self, size: int, width: int, count: int) -> Verified:
        """Returns the results of the first ``count`` requests. A slice costs microseconds."""
        view = self._views.get((size, width, count))
        if view is None:
            graphs, rows = self._graphs[size, width], count * width
            view = self._views[size, width, count] = Verified(
                size, width, graphs.placed, graphs.logits[:rows], self._samples[:rows],
                self.state.packed[:count].view(-1))
        return view

    def _record(self, size: int, width: int) -> None:
        self._inputs.fill(_no_chains(width), size)
        recorder, inputs, parts = self._recorder, self._inputs.tensors, self._parts
        pages = ChainPages(inputs["kv_indptr"][:size + 1], inputs["kv_indices"], *self._pool)
        batches = ChainBatches.of(pages, {width, width + 1})
        known = KnownChains(inputs["positions"][:size], inputs["tokens"][:size * width].view(size, width),
                            inputs["num_drafts"][:size])
        sources, limits = inputs["sources"][:size], inputs["limits"][:size]
        samples = self._samples[:size * width]

        def verify() -> tuple[torch.Tensor, torch.Tensor | None, PlacedChains]:
            placed = place_chains(self.state, sources, known, limits, pages)
            batch = batches.of_rows(placed.rows)
            context = StepContext(batch, parts.attention.plan(batch, parts.workspace, max_length=self._max_length))
            features = None
            if parts.features is None:
                logits = parts.model.forward(context)
            else:
                states, features = parts.model.hidden_states_and_features(context, parts.features.layers)
                logits = parts.model.compute_logits(states)
            argmax(logits, samples)
            return logits, features, placed

        (logits, features, placed), replay = recorder.record(verify)
        replay()
        replays: dict[bool, Replay] = {}
        for greedy in (True, False):
            if width == 1 and replays:
                replays[greedy] = replays[True]
                break
            sampler = self._samplers(size, greedy)

            def draft(sampler: ChainSampler = sampler) -> None:
                accepted = accept_chains(samples, placed, self.state, pages, width - 1, self._simulated)
                drafts = self.state.tokens[:size, 1:width]
                parts.drafter.draft_chains(ChainStep(placed, accepted, batches, features, drafts, sampler,
                                                     self._max_length))

            _, replays[greedy] = recorder.record(draft)
            replays[greedy]()  # the first launch uploads the graph to the device, which requests would wait for
        self._graphs[size, width] = _Graphs(replay, replays, recorder.alias(logits), placed, batches)

    @property
    def _max_length(self) -> int:
        """The longest sequence that attention reads."""
        return self._pool.max_length + 2 * max(self._sizes)


def _no_chains(width: int) -> ChainRows:
    none = np.empty(0, np.int64)
    return ChainRows(width, none, none, none.reshape(0, width), none, none, np.zeros(1, np.int32),
                     np.empty(0, np.int32))
