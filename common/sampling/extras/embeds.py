"""Input embeddings: rows that are computed from a client's embeddings in place of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...request.extras import EXTRAS, Extra
from ...request.step_input import StepInput

EMBEDS = EXTRAS.register("input_embeds")(Extra(frozenset(("embeds",)), lambda req: req.embeds is not None))


def embeds_of(step: StepInput) -> Sequence[tuple[int, np.ndarray]]:
    """Returns the first token row of each run with embeddings, and these [n, hidden] float32."""
    found = []
    for index in step.extra_index:
        embeds = step.reqs[index].embeds
        if embeds is not None and step.starts[index] < len(embeds):
            start, first = int(step.starts[index]), int(step.columns.qo_indptr[index])
            found.append((first, embeds[start:start + int(step.q_lens[index])]))
    return found
