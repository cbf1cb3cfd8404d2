"""Internal seeds of requests without one, on servers that speculate.

A draft is accepted where it is the token that the model samples, so the drafter samples with the noise that the model
will sample with: a hash of a seed and a position, which every request then needs.
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from ..api.messages import Generate
from ..api.sampling import SamplingParams


def seeded(message: Generate, random_seed: int) -> SamplingParams:
    """Returns the request's sampling parameters, with a seed where it samples and has none.

    The seed is a hash of the request's bootstrap room, else of its id, and ``random_seed`` (the server's
    ``--random-seed``): equal on all ranks and on both servers of a pair, and another for each choice of a prompt.
    """
    params = message.sampling
    if params.seed is not None or params.greedy:
        return params
    name = f"id {message.rid}" if message.bootstrap is None else f"room {message.bootstrap.room}"
    digest = hashlib.blake2b(f"{random_seed} {name}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little", signed=True))
