"""Verification: a draft is accepted where it is the token that the model itself samples at its position.

That is lossless for every sampling method: each token is sampled from the model's own distribution, at its own position
(and seed), after tokens that were sampled before it.

The rows of a request in a step are its newest token and its drafts, in their order; each has a sample. From the first
row the walk goes on to the draft that equals the sample of the last one reached, while there is one. A row that has
failed (its sample is negative) ends the walk before it, unless it is the first: the next step begins with it.
``kernels/speculative/accept_chains.py`` does the same for chains, without the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
