"""Piecewise CUDA graphs of prefill steps: what layers compute row by row launches at once, attention does not.

Between the attentions of two layers nothing depends on how rows belong to requests, so that a graph captured for a
number of rows computes any batch of up to as many. In the last layer the graphs end before its attention: after it few
rows are left.

Padding rows are zeros at first, and then have what steps before have left there. They are not routed to experts, their
keys are not stored, and no row that is a token depends on them.
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
from ...distributed.capture import may_capture_prefill
from ...distributed.parallel import Parallel
from ...distributed.step_rows import StepRows
from ...forward.host_copies import upload_joined
from ...forward.piecewise import Projected
from ...layers.moe import MoE
from ...models.decoder.causal_lm import CausalLM
from .capture_profile import captured_size

_MAX_PADDING_RATIO = 1.0625
"""Rows computed for each token, at most, where padding costs something."""
_MAX_PADDING_RATIO_MOE_DP = 2.0
"""The same ratio with data-parallel attention and MoE, whose experts compute no padding: it costs a group nothing to
compute as many rows as the others do meanwhile, and the exchange moves as many rows as a sum over copies of all would.
"""

T = TypeVar("T")
Replay = Callable[[], None]


class Recorder(Protocol):
    """Records work on tensors with fixed addresses."""

    def record(self, work: Callable[[], T]) -> tuple[T, Replay]:
        """Returns the tensors with the results of ``work``, and a callable that runs it again."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same memory that does not own it: later recordings may use the memory as well."""


class GraphSizes(NamedTuple):
    """The sizes to record, in rows. Steps of up to ``launch_bound`` rows take the same time however many are tokens."""

    sizes: list[int]
    launch_bound: int


class LayerGraph(NamedTuple):
    """The graph between two attentions, and its outputs."""

    replay: Replay
    projected: Projected
    residual: torch.Tensor


def default_sizes(largest: int) -> list[int]:
    """Returns sizes in tokens, four an octave beyond 256: a step is padded by an eighth on average."""
    sizes = [32, 64, 128, 192, 256]
    sizes += [quarter << bits for bits in range(6, largest.bit_length()) for quarter in (5, 6, 7, 8)]
    return [size for size in sizes if size < largest] + [largest]


def prefill_graph_sizes(config: ServerConfig, spec: ModelSpec, parallel: Parallel) -> list[int]:
    """Returns the sizes that may be recorded with ``config``, on ranks that may capture; none for hybrid models, whose
    layers differ."""
    if spec.state is not None:
        return []
    largest = config.captured_prompts(spec.context_length)
    requested = [size for size in config.kernels.piecewise_cuda_graph_tokens if size <= largest]
    sizes = sorted(requested) or default_sizes(largest)
    return [size for size in sizes if 0 < size <= largest and may_capture_prefill(parallel, size)]


class PrefillGraphs:
    """Records at construction. ``groups``: attention groups that compute together, with as many rows each.
    ``rows_of`` makes the rows of a step of a size, ``progress`` is called with the fraction done."""

    def __init__(self, model: CausalLM, recorded: GraphSizes, groups: int, recorder: Recorder,
                 rows_of: Callable[[int], StepRows], progress: Callable[[float], None]):
        self._sizes, self._launch_bound = sorted(recorded.sizes), recorded.launch_bound
        self._groups = groups
        is_moe_dp = groups > 1 and isinstance(model.layers[-1].mlp, MoE)
        self._max_padding_ratio = _MAX_PADDING_RATIO_MOE_DP if is_moe_dp else _MAX_PADDING_RATIO
        largest, device = self._sizes[-1], model.device
        self._inputs = torch.zeros(largest, model.hidden_size, dtype=model.dtype, device=device)
        self._attention_out = torch.zeros(largest, model.layers[0].attention.width, dtype=model.dtype, device=device)
        self._live = torch.zeros(groups * largest, dtype=torch.int32, device=device)
        self._marked: tuple[int, list[int]] | None = None  # the size and the tokens of each group that ``_live`` has
        self._pieces: dict[int, list[LayerGraph]] = {}
        # The largest first: the smaller ones then fit into its memory.
        for done, size in enumerate(reversed(self._sizes), 1):
            rows = rows_of(size).with_live(self._live[:groups * size])
            with captured_size("prompts", size):
                self._pieces[size] = self._record(model, size, rows, recorder)
            progress(done / len(self._sizes))

    def _record(self, model: CausalLM, size: int, rows: StepRows, recorder: Recorder) -> list[LayerGraph]:
        pieces: list[LayerGraph] = []
        x, residual = self._inputs[:size], None
        for index in range(len(model.layers)):
            (projected, residual), replay = recorder.record(
                partial(model.between_attentions, index, x, residual, rows))
            replay()  # the next piece is tried on this one's results
            pieces.append(LayerGraph(replay, tuple(map(recorder.alias, projected)), recorder.alias(residual)))
            x = self._attention_out[:size]
        return pieces

    def size_for(self, num_tokens: Sequence[int]) -> int | None:
        """Returns the recorded size at which a step with ``num_tokens`` of each attention group runs; None where it is
        larger than all, or too large a part would be padding."""
        index = bisect_left(self._sizes, max(num_tokens))
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        if size <= self._launch_bound or size * len(num_tokens) <= self._max_padding_ratio * sum(num_tokens):
            return size
        return None

    def step(self, size: int, num_tokens: list[int], own: int) -> GraphedStep:
        """Returns the graphs of a step at ``size`` with ``num_tokens`` of each attention group, ``own`` of this one.
        The next step overwrites their results."""
        if self._marked != (size, num_tokens):
            self._mark_live(size, num_tokens)
        # The residual is accumulated in place: that of padding rows would grow from step to step.
        self._inputs[own:size].zero_()
        return GraphedStep(self._pieces[size], self._inputs[:own], self._attention_out[:own], own)

    def _mark_live(self, size: int, tokens: list[int]) -> None:
        if self._groups == 1:
            self._live[:tokens[0]].fill_(1)
            self._live[tokens[0]:size].fill_(0)
        else:
            live = np.arange(size) < np.array(tokens)[:, None]
            self._live[:len(tokens) * size] = upload_joined([live.ravel()], torch.int32, self._live.device)
        self._marked = size, list(tokens)


class GraphedStep:
    """The graphs of a step of ``rows`` rows, see forward.piecewise."""

    def __init__(self, pieces: list[LayerGraph], inputs: torch.Tensor, attention_out: torch.Tensor, rows: int):
        self._pieces = pieces
        self._inputs = inputs
        self.attention_out = attention_out
        self._rows = rows

    def run(self, index: int, x: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        if index == 0:
            self._inputs.copy_(x)
        elif x.data_ptr() != self.attention_out.data_ptr():
            self.attention_out.copy_(x)
        piece = self._pieces[index]
        piece.replay()
        return tuple(part[:self._rows] for part in piece.projected), piece.residual[:self._rows]


class GraphRecorder:
    """Records CUDA graphs, all of them on one stream and in one memory pool, of one device."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._memory: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[T, Replay]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # libraries allocate and compile outside of the capture
            # Other threads of a rank (NCCL's, transfers') call CUDA too, and must not end the capture.
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return results, graph.replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # A tensor would reserve its memory, and that of all layers and sizes is several GiB.
        storage = tensor.untyped_storage()
        memory = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        assert memory.data_ptr() == storage.data_ptr()
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Bytes:
    """Device memory with CUDA's array interface."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
