"""Longest output first: what will run longest starts first, so that a batch of jobs does not end with one long one."""

from __future__ import annotations

from ...request.req import Req


def key(req: Req) -> float:
    return -float(req.sampling.max_new_tokens)
