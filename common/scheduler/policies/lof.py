"""Longest output first: the longest runs start first, so that a batch of jobs does not end with a long one alone."""

from __future__ import annotations

from ...request.req import Req


def key(req: Req) -> float:
    return -float(req.sampling.max_new_tokens)
