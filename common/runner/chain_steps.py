"""Chain steps of a rank: which it captures, at start and when memory is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch

from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..forward.chain_rows import ChainLevels, ChainRows
from ..forward.forward_batch import NO_COLUMNS, ForwardBatch
from ..request.req import Req
from ..sampling.chain_draft_sampling import ChainDraftSampling
from ..speculative.base import ChainDrafter, Drafter
from ..speculative.simulated import SimulatedAcceptance, SimulatedChains
from ..weights.loader import Progress
from .cuda_graphs.chain_graphs import ChainGraphs, ChainModel, ChainPool, Verified
from .cuda_graphs.chain_sizes import chain_sizes
from .cuda_graphs.piecewise_graphs import GraphRecorder, Recorder
from .cuda_graphs.try_capture import try_capture


class ChainSteps:
    """One rank's chain steps; all ranks of the engine make the same calls."""

    def __init__(self, parts: ChainModel, pool: ChainPool, parallel: Parallel,
                 simulated: SimulatedAcceptance | None = None):
        self._parts = parts
        self._pool = pool
        self._parallel = parallel
        self._sizes: Mapping[int, Sequence[int]] = {}
        self._simulated = simulated
        self._exact = False
        self._recorded: _Recorded | None = None

    @property
    def levels(self) -> ChainLevels | None:
        """The steps that are captured, or will be when memory is resumed."""
        if not self._sizes:
            return None
        counts = sorted(self._sizes)
        exact = tuple(frozenset(self._sizes[count]) for count in counts) if self._exact else ()
        return ChainLevels(tuple(counts), tuple(max(self._sizes[count]) for count in counts), self._pool.scratch_page,
                           exact)

    def select(self, config: ServerConfig) -> None:
        """Selects the steps that ``capture`` records, on ranks that may: those of the flags that attention computes
        without the host."""
        self._exact = config.kernels.disable_cuda_graph_padding
        self._sizes = {count: sizes for count, sizes in chain_sizes(config).items()
                       if self._verifies(max(count, 1) + 1)}
        if not any(self._sizes):  # plain steps alone need none
            self._sizes = {}

    def _verifies(self, width: int) -> bool:
        none, own = torch.empty(0, dtype=torch.int64, device=self._parts.model.device), NO_COLUMNS
        return self._parts.attention.verifies(ForwardBatch(
            width, none, none, none, none, none, none, none, none, None, own.qo_indptr, own.kv_indptr, own.kv_indices,
            own.kv_last_page_len, verifies=True))

    def capture(self, progress: Progress) -> None:
        """Captures what is selected. Without graphs a server is only slower: a kind of model that cannot be captured
        runs eagerly, and a warning says so."""
        if not self._sizes:
            return
        sizes = self._sizes
        if not try_capture(lambda: self.record(sizes, GraphRecorder(self._parts.model.device), progress),
                           self._parallel, "Steps with drafts", "them"):
            self._sizes, self._recorded = {}, None

    @torch.inference_mode()
    def record(self, sizes: Mapping[int, Sequence[int]], recorder: Recorder, progress: Progress) -> None:
        """Records graphs of ``sizes``, in requests, by the number of drafts; chain steps replay them from now on."""
        largest, device = max(map(max, sizes.values())), self._parts.model.device
        sampling = ChainDraftSampling(largest, device)
        draws = None if self._simulated is None else SimulatedChains(self._simulated, largest, device)
        counts = None if draws is None else draws.counts
        graphs = ChainGraphs(self._parts, self._pool, sizes, recorder, sampling, counts,
                             lambda fraction: progress("CUDA graphs of drafts", fraction))
        self._sizes, self._recorded = sizes, _Recorded(graphs, sampling, draws)

    def release(self) -> None:
        """Drops the graphs, which contain addresses."""
        self._recorded = None

    @torch.inference_mode()
    def verify(self, chains: ChainRows) -> Verified:
        """Computes the rows of a step, and stores their keys and values; samples may be written until ``draft``."""
        assert self._recorded is not None
        return self._recorded.graphs.verify(chains)

    @torch.inference_mode()
    def draft(self, verified: Verified, reqs: Sequence[Req], *, greedy: bool) -> None:
        """Accepts drafts, and drafts anew, by the samples of the step of ``reqs``; ``greedy``: all of them are."""
        assert self._recorded is not None
        graphs, sampling, draws = self._recorded
        if not greedy:
            sampling.update([req.sampling for req in reqs])
        if draws is not None:
            draws.update([req.rid for req in reqs])
        graphs.draft(verified, greedy=greedy)


class _Recorded(NamedTuple):
    graphs: ChainGraphs
    sampling: ChainDraftSampling
    draws: SimulatedChains | None


def chain_drafter(drafter: Drafter | None) -> ChainDrafter | None:
    """Returns ``drafter`` where it drafts chains without the host."""
    return cast(ChainDrafter, drafter) if hasattr(drafter, "draft_chains") else None
