"""What is captured of a decode step; the device is played, for a graph needs a GPU."""

from __future__ import annotations

import contextlib
from unittest.mock import MagicMock, patch

import numpy as np
import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.step_rows import ONE_GROUP
from baton.common.forward.forward_batch import NO_COLUMNS, BatchColumns, ModelInput
from baton.common.runner.cuda_graphs.decode_graphs import DecodeGraphs, GraphPages


class Played:
    """Attention and model: a step needs the plan that the attention's first layer has made since ``plan``."""

    def __init__(self):
        self.capturing = False
        self.made_in_capture = None
        self.captured = []
        self.token_exchange = Parallel().token_exchange

    def plan(self, batch, workspace, max_length):
        assert max_length == 32
        self.made_in_capture = None
        return self

    def refresh(self, batch):
        self.refreshed = batch

    def forward(self, step):
        if self.made_in_capture is None:  # as backends do, whose plans are computed on the device
            self.made_in_capture = self.capturing
        if self.capturing:
            self.captured.append((step.batch.num_reqs, self.made_in_capture))
        return torch.zeros(step.batch.num_reqs, 3)

    @contextlib.contextmanager
    def graph(self, made, **options):
        self.capturing = True
        yield
        self.capturing = False


def captured(played, begin=lambda size: (ONE_GROUP, ONE_GROUP), progress=lambda share: None, **options):
    """Graphs of 1, 2 and 4 rows over two pages of 16 tokens each; page 9 is the padding's."""
    cuda = {"Stream": MagicMock(), "current_stream": MagicMock(), "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": MagicMock(), "graph": played.graph, "graph_pool_handle": MagicMock()}
    with patch.multiple(torch.cuda, **cuda):
        return DecodeGraphs(played, played, None, [1, 2, 4], 16, [GraphPages(2, 9)], torch.device("cpu"), begin,
                            progress, **options)


def test_a_graph_holds_the_making_of_its_plan():
    """Else replays would read the plan of the padding, from memory that has been given back."""
    played, seen, begun = Played(), [], []
    graphs = captured(played, lambda size: begun.append(size) or (ONE_GROUP, ONE_GROUP), seen.append)
    assert played.captured == [(4, True), (2, True), (1, True)]
    assert begun == [4, 2, 1]
    assert graphs.size_for(3) == 4 and graphs.size_for(5) is None and seen == [1 / 3, 2 / 3, 1]


def test_a_graph_is_launched_before_requests_come():
    """Its first launch takes longer; what it reads then is padding, whose keys and values go to the scratch page."""
    launched = []

    class Launched(Played):
        @contextlib.contextmanager
        def graph(self, made, **options):
            with super().graph(made, **options):
                made.replay = lambda: launched.append(graphs_table(self.batch))
                yield

        def forward(self, step):
            self.batch = step.batch
            return super().forward(step)

    def graphs_table(batch):
        return batch.num_reqs, set(batch.page_of_token.tolist()), set(batch.kv_indices.tolist())

    captured(Launched())
    assert launched == [(4, {9}, {9}), (2, {9}, {9}), (1, {9}, {9})]


def test_argmax_tokens_stay_in_the_graph_that_computed_them():
    """It copies them itself; tokens of other steps, rows or sizes are copied, also when another batch ran between."""
    graphs = captured(Played())
    columns = BatchColumns(np.array([3, 17]), np.array([5, 7]), np.array([3, 1]), np.array([0, 1, 3], np.int32),
                           np.array([5, 8, 7], np.int32), np.array([4, 2], np.int32), None, np.arange(3), 1)
    ids = graphs._input_views[2][0]["input_ids"]

    def given(tokens, size=2, follows=False):
        ids.fill_(99)  # stands for what the graph has left there
        found = graphs.decode(ModelInput(columns, tokens, follows_argmax=follows), size)[1]
        return ids.tolist(), found

    assert given(torch.tensor([11, 12]))[0] == [11, 12]
    seen, argmax = given(torch.tensor([13, 14]))
    assert seen == [13, 14]
    assert given(argmax, follows=True)[0] == [99, 99]
    assert given(argmax)[0] == [0, 0]
    other = given(torch.tensor([15, 16]), 4)[1]
    assert given(argmax, follows=True)[0] == [0, 0] and given(other)[0] == [0, 0]
    assert given(argmax, follows=True)[0] == [99, 99]
    graphs.decode(ModelInput(NO_COLUMNS, argmax[:0]), 2)
    assert given(argmax, follows=True)[0] == [0, 0]


def test_a_decode_table_is_written_to_the_graphs_inputs():
    played = Played()
    graphs = captured(played)
    columns = BatchColumns(np.array([3, 17, 4]), np.array([5, 7, 6]), np.array([3, 1, 4]),
                           np.array([0, 1, 3, 4], np.int32), np.array([5, 8, 7, 6], np.int32),
                           np.array([4, 2, 5], np.int32), None, np.arange(4), 1)
    logits, argmax = graphs.decode(ModelInput(columns, torch.tensor([11, 12, 13])), 4)
    assert logits.shape == (3, 3) and argmax.tolist() == [0, 0, 0]
    batch = played.refreshed
    assert batch.num_reqs == 4 and batch.input_ids[:3].tolist() == [11, 12, 13]
    assert batch.positions.tolist() == [3, 17, 4, 0] and batch.page_of_token.tolist() == [5, 7, 6, 9]
    assert batch.kv_indptr.tolist() == batch.kv_indptr_cpu.tolist() == [0, 1, 3, 4, 5]
    assert batch.kv_indices[:5].tolist() == batch.kv_indices_cpu.tolist() == [5, 8, 7, 6, 9]
    assert batch.kv_last_page_len.tolist() == batch.kv_last_page_len_cpu.tolist() == [4, 2, 5, 1]
    assert graphs._input_views[4][0]["positions"].data_ptr() == batch.positions.data_ptr()


def test_without_padding_other_sizes_have_no_graph():
    graphs = captured(Played(), exact=True)
    assert [graphs.size_for(count) for count in range(1, 6)] == [1, 2, None, 4, None]
