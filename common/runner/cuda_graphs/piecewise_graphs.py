"""Prompts' steps as CUDA graphs in pieces: what a layer computes row by row launches at once, attention does not.

Between the attentions of two layers nothing depends on how rows belong to requests, so that a graph captured for a
number of rows computes any batch of up to so many. (vLLM and SGLang call them piecewise CUDA graphs.) Of the last layer
only what stands before its attention is recorded: behind it few rows are left.

Rows of padding begin as zeros, and attend to what steps before have left there. They are not routed to experts, nobody
stores their keys, and no row that is a token depends on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ...config.model import ModelSpec
from ...config.server import ServerConfig
from ...distributed.capture import may_capture_prompts
from ...distributed.live_rows import LiveRows
from ...distributed.parallel import Parallel
from ...forward.host_copies import upload_joined
from ...layers.moe import MoE
from ...models.causal_lm import CausalLM
from ...models.piecewise import Projected

_MOST_PADDED = 1.0625
"""Rows computed for each that is a token, where they cost something."""
_MOST_PADDED_GROUPS = 2.0
"""The same of attention groups that meet in experts, which compute no padding: it costs a group nothing to compute as
many rows as the others do meanwhile, and what travels is what a sum over copies of all rows would move."""

T = TypeVar("T")
Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on tensors that stay where they are."""

    def record(self, work: Callable[[], T]) -> tuple[T, Replay]:
        """The tensors that it leaves its results in, and how to do it again."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which what is recorded later may use as well."""


class Recorded(NamedTuple):
    """What to record: steps of ``sizes`` rows, of which those up to ``free`` take as long with a token as with all."""

    sizes: list[int]
    free: int


class Piece(NamedTuple):
    replay: Replay
    projected: Projected
    residual: torch.Tensor


def default_sizes(largest: int) -> list[int]:
    """Tokens, four sizes an octave beyond 256: a step is padded by an eighth on average."""
    sizes = [32, 64, 128, 192, 256]
    sizes += [quarter << bits for bits in range(6, largest.bit_length()) for quarter in (5, 6, 7, 8)]
    return [size for size in sizes if size < largest] + [largest]


def prompt_sizes(config: ServerConfig, spec: ModelSpec, parallel: Parallel) -> list[int]:
    """Those that may be recorded of a server of ``config``, whose ranks may capture."""
    largest = config.captured_prompts(spec.context_length)
    wanted = [size for size in config.kernels.piecewise_cuda_graph_tokens if size <= largest]
    sizes = sorted(wanted) or default_sizes(largest)
    return [size for size in sizes if 0 < size <= largest and may_capture_prompts(parallel, size)]


class PrefillGraphs:
    """Records at construction. ``groups``: attention groups whose rows meet in a layer, as many of each. ``begin`` is
    told of a size before a step of it is computed, ``progress`` of the share that is done."""

    def __init__(self, model: CausalLM, wanted: Recorded, groups: int, live: LiveRows, recorder: Recorder,
                 begin: Callable[[int], None], progress: Callable[[float], None]):
        self._sizes, self._free = sorted(wanted.sizes), wanted.free
        self._groups = groups
        in_experts = groups > 1 and isinstance(model.layers[-1].mlp, MoE)
        self._most_padded = _MOST_PADDED_GROUPS if in_experts else _MOST_PADDED
        most, device = self._sizes[-1], model.cos_sin.device
        self._entering = torch.zeros(most, model.width, dtype=model.dtype, device=device)
        self._heads = torch.zeros(most, model.layers[0].attention.width, dtype=model.dtype, device=device)
        self._live = torch.zeros(groups * most, dtype=torch.int32, device=device)
        self._marked: tuple[int, list[int]] | None = None  # a size, and the tokens of each group that ``_live`` tells
        self._pieces: dict[int, list[Piece]] = {}
        # The largest first: the smaller ones then fit into its memory.
        for done, size in enumerate(reversed(self._sizes), 1):
            begin(size)
            with live.of(self._live[:groups * size]):
                self._pieces[size] = self._record(model, size, recorder)
            progress(done / len(self._sizes))

    def _record(self, model: CausalLM, size: int, recorder: Recorder) -> list[Piece]:
        pieces: list[Piece] = []
        rows, residual = self._entering[:size], None
        for index in range(len(model.layers)):
            (projected, residual), replay = recorder.record(partial(model.between, index, rows, residual))
            replay()  # the next piece is tried on what this one gives
            pieces.append(Piece(replay, tuple(map(recorder.alias, projected)), recorder.alias(residual)))
            rows = self._heads[:size]
        return pieces

    def size_for(self, tokens: Sequence[int]) -> int | None:
        """The recorded size at which a step of so many ``tokens`` of each attention group runs; None where it is larger
        than all, or would be padding for too large a part."""
        index = bisect_left(self._sizes, max(tokens))
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        return size if size <= self._free or size * len(tokens) <= self._most_padded * sum(tokens) else None

    def step(self, size: int, tokens: list[int], own: int) -> RecordedStep:
        """The pieces of a step at ``size``, of so many ``tokens`` of each attention group, ``own`` of this one's. The
        next one overwrites what they give."""
        if self._marked != (size, tokens):
            self._mark(size, tokens)
        # The residual grows where it stands: padding's would from step to step.
        self._entering[own:size].zero_()
        return RecordedStep(self._pieces[size], self._entering[:own], self._heads[:own], own)

    def _mark(self, size: int, tokens: list[int]) -> None:
        if self._groups == 1:
            self._live[:tokens[0]].fill_(1)
            self._live[tokens[0]:size].fill_(0)
        else:
            live = np.arange(size) < np.array(tokens)[:, None]
            self._live[:len(tokens) * size] = upload_joined([live.ravel()], torch.int32, self._live.device)
        self._marked = size, list(tokens)


class RecordedStep:
    """Pieces (see models.pieces) of ``rows`` rows."""

    def __init__(self, pieces: list[Piece], entering: torch.Tensor, heads: torch.Tensor, rows: int):
        self._pieces = pieces
        self._entering = entering
        self.heads = heads
        self._rows = rows

    def before(self, index: int, x: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        if index == 0:
            self._entering.copy_(x)
        elif x.data_ptr() != self.heads.data_ptr():
            self.heads.copy_(x)
        piece = self._pieces[index]
        piece.replay()
        return tuple(part[:self._rows] for part in piece.projected), piece.residual[:self._rows]


class GraphRecorder:
    """Records CUDA graphs, all of them on one stream and in one pool of memory, of one device."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._memory: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[T, Replay]:
        work()  # libraries allocate and compile outside of the capture
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads of a rank (NCCL's, transfers') call CUDA too, and must not end the capture.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return results, graph.replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor would keep its memory for itself, and that of all layers and sizes is several GiB.
        storage = tensor.untyped_storage()
        whole = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        assert whole.data_ptr() == storage.data_ptr()
        return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Bytes:
    """Device memory as CUDA's array interface tells of it."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
