"""Makes the workload that the flags describe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.api.errors import ConfigError
from .formats.base import read_trace
from .request import SimRequest, at_rate, span
from .synthetic import Lengths, arrivals, synthetic

if TYPE_CHECKING:
    from ..args import WorkloadArgs

DEFAULT_RATE, DEFAULT_REQUESTS = 4.0, 1000


def make_workload(args: WorkloadArgs) -> list[SimRequest]:
    """In the order of the arrivals. Raises ConfigError."""
    if args.trace is None:
        return synthetic(args.rate or DEFAULT_RATE, args.num_requests or DEFAULT_REQUESTS,
                         Lengths.parse(args.input_len, "--input-len"), Lengths.parse(args.output_len, "--output-len"),
                         cv=args.arrival_cv, groups=args.shared_prefix_groups, shared=args.shared_prefix_len,
                         seed=args.seed)
    requests = read_trace(args.trace, args.trace_format, args.num_requests)
    if span(requests) > 0:
        return requests if args.rate is None else at_rate(requests, args.rate)
    if args.rate is None:
        raise ConfigError(f"{args.trace} has no times: give --rate, the requests a second.")
    return _timed(requests, args)


def _timed(requests: list[SimRequest], args: WorkloadArgs) -> list[SimRequest]:
    """Requests without times of their own, at ``--rate``."""
    import numpy as np

    assert args.rate is not None
    times = arrivals(args.rate, len(requests), args.arrival_cv, np.random.default_rng(args.seed))
    return [SimRequest(at, each.input_len, each.output_len, each.blocks, each.block_size)
            for at, each in zip(times.tolist(), requests)]
