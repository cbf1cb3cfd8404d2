"""Verification: a draft is accepted where it is the token that the model itself samples at its position.

That is lossless for every sampling method: each token is sampled from the model's own distribution, at its own position
(and seed), after tokens that were sampled before it.

The rows of a request in a step are its newest token and its drafts, in their order; each has a sample. From the first
row the walk goes on to the draft that equals the sample of the last one reached, while there is one. A row that has
failed (its sample is negative) ends the walk before it, unless it is the first: the next step begins with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..api.drafts import Drafts


def accept(samples: Sequence[int], sizes: Sequence[int],
           drafts: Mapping[int, Drafts]) -> tuple[list[int], list[int]]:
    """Returns how many tokens each request gets, and all of these: the samples of ``accepted_rows``."""
    counts, rows = accepted_rows(samples, sizes, drafts)
    return counts, [samples[row] for row in rows]


def accepted_rows(samples: Sequence[int], sizes: Sequence[int],
                  drafts: Mapping[int, Drafts]) -> tuple[list[int], list[int]]:
    """Returns how many rows each request has accepted, and all of these. ``samples`` has ``sizes[b]`` rows of request
    b, one more than ``drafts[b]``."""
    counts: list[int] = []
    rows: list[int] = []
    end = 0
    for request, size in enumerate(sizes):
        begin, end = end, end + size
        found = drafts.get(request)
        if found is None:
            rows.append(begin)
            counts.append(1)
        elif found.parents is None:
            count = 1
            for token, sample, own in zip(found.tokens, samples[begin:end], samples[begin + 1:end]):
                if token != sample or own < 0:
                    break
                count += 1
            rows += range(begin, begin + count)
            counts.append(count)
        else:
            path = _walk(samples[begin:end], found.tokens, found.parents)
            rows += [begin + row for row in path]
            counts.append(len(path))
    return counts, rows


def _walk(samples: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns the accepted rows of a tree, whose drafts come after their parents."""
    path = [0]
    for row, (token, parent) in enumerate(zip(tokens, parents), 1):
        if parent + 1 == path[-1] and token == samples[path[-1]] and samples[row] >= 0:
            path.append(row)
    return path


def row_parents(sizes: Sequence[int] | np.ndarray, drafts: Mapping[int, Drafts]) -> np.ndarray:
    """Returns the row [S] int64 before each of the ``sizes[b]`` rows of requests b (at least one request), S for the
    first of each request."""
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1])
    parents = np.arange(-1, total - 1)
    begins = ends - sizes
    for request, found in drafts.items():
        if found.parents is not None:
            begin = int(begins[request])
            parents[begin + 1:begin + 1 + len(found)] = np.array(found.parents) + (begin + 1)
    parents[begins] = total
    return parents


class AcceptedOnDevice(NamedTuple):
    """Accepted rows on the device: ``counts`` [B] int64, ``rows`` [B, depth + 1] int64, of which the first
    ``counts[b]`` are request b's, the others S; and ``newest`` [B] int64, its newest token."""

    counts: torch.Tensor
    rows: torch.Tensor
    newest: torch.Tensor


def accept_on_device(samples: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, begins: torch.Tensor,
                     depth: int) -> AcceptedOnDevice:
    """Does as ``accepted_rows``, without waiting for the device.

    ``samples`` [S] int64 come after the ``tokens`` [S] int64 of the rows, ``parents`` [S] are ``row_parents``,
    ``begins`` [B] the first row of each request, and ``depth`` is that of the deepest draft. Of several drafts with one
    parent and token the first counts.
    """
    size = len(samples)
    matches = (tokens == samples[parents.clamp(max=size - 1)]) & (parents < size) & (samples >= 0)
    # The row that each one's sample leads to; S at the end of a walk.
    following = samples.new_full((size + 1,), size)
    rows = torch.arange(size, device=samples.device)
    following.scatter_reduce_(0, torch.where(matches, parents, size), rows, "amin")
    following[size] = size
    path = [begins]
    for _ in range(depth):
        path.append(following[path[-1]])
    walked = torch.stack(path, -1)
    counts = (walked < size).sum(-1)
    return AcceptedOnDevice(counts, walked, samples[walked.gather(-1, counts[:, None] - 1)[:, 0]])
