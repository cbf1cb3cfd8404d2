"""What is captured of a decode step; the device is played, for a graph needs a GPU."""

from __future__ import annotations

import contextlib
from unittest.mock import MagicMock, patch

import torch

from baton.common.engine.graphs import DecodeGraphs


class Played:
    """Attention and model: a step needs the plan that the attention's first layer has made since ``plan``."""

    def __init__(self):
        self.capturing = False
        self.made_in_capture = None
        self.captured = []

    def plan(self, batch, max_length=None):
        assert max_length == 32
        self.made_in_capture = None

    def forward(self, batch, attention, after_layer):
        if self.made_in_capture is None:  # as backends do, whose plans are computed on the device
            self.made_in_capture = self.capturing
        if self.capturing:
            self.captured.append((batch.num_reqs, self.made_in_capture))
        return torch.zeros(batch.num_reqs, 3)

    @contextlib.contextmanager
    def graph(self, made, **options):
        self.capturing = True
        yield
        self.capturing = False


def test_a_graph_holds_the_making_of_its_plan():
    """Else replays would read the plan of the padding, from memory that has been given back."""
    played, seen, begun = Played(), [], []
    cuda = {"Stream": MagicMock(), "current_stream": MagicMock(), "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": MagicMock(), "graph": played.graph, "graph_pool_handle": MagicMock()}
    with patch.multiple(torch.cuda, **cuda):
        graphs = DecodeGraphs(played, played, [1, 2, 4], 16, 2, 9, torch.device("cpu"), begun.append, seen.append)
    assert played.captured == [(4, True), (2, True), (1, True)]
    assert begun == [4, 2, 1]
    assert graphs.size_for(3) == 4 and graphs.size_for(5) is None and seen == [1 / 3, 2 / 3, 1]
