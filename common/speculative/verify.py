"""Verification: a draft is accepted where it is the token that the model itself samples at its position.

That is lossless for every sampling method: each token is sampled from the model's own distribution, at its own position
(and seed), after tokens that were sampled before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..api.drafts import Drafts


def accept(samples: Sequence[int], sizes: Sequence[int],
           drafts: Mapping[int, Drafts]) -> tuple[list[int], list[int]]:
    """Returns how many tokens each request gets, and all of these. ``samples`` has ``sizes[b]`` tokens of request b,
    sampled after its last token and after each of its drafts; a request gets those up to the first that differs from
    the draft at its position."""
    counts: list[int] = []
    tokens: list[int] = []
    end = 0
    for request, size in enumerate(sizes):
        begin, end = end, end + size
        count = 1
        for sample, draft in zip(samples[begin:end], drafts[request].tokens if request in drafts else ()):
            if sample != draft:
                break
            count += 1
        counts.append(count)
        tokens += samples[begin:begin + count]
    return counts, tokens
