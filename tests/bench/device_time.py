"""Work on a GPU: as a CUDA graph, and timed by events."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """``work`` as a CUDA graph: launches cost what they cost in a decode step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def run_seconds(work: Callable[[], object], repeats: int,
                before: Callable[[], object] = lambda: None) -> list[float]:
    """Of each run, one after the other; ``before`` runs ahead of each, and does not count."""
    times = []
    for _ in range(repeats):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times
