"""Fingerprint of stored pages: equal where a page of the same key has the same content, whatever the topology.

It covers the model's weights and their version, what computes them, the draft model, and the layout of a page, but for
the number of ranks and layer groups. Weights that are replaced at run time are part of the page keys' namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...api.identity import ModelIdentity
from ..layout import KVLayout
from .objects import FORMAT_VERSION


@dataclass(frozen=True)
class StoredPool:
    """A pool whose pages are stored; ``num_kv_heads`` are the model's, of all ranks."""

    layout: KVLayout
    num_kv_heads: int
    is_draft: bool = False


def storage_digest(model: ModelIdentity, pools: Sequence[StoredPool], *, weight_version: str = "default",
                   compute: Sequence[str | None] = (), lookahead: int = 0, draft: ModelIdentity | None = None) -> str:
    """Returns 32 hex digits. ``compute``: names on which the model's numbers depend besides its weights (dtype,
    quantization at load); ``lookahead`` is that of the page keys."""
    facts = {"format": FORMAT_VERSION, "model": model.fingerprint, "weight_version": weight_version,
             "compute": list(compute), "lookahead": lookahead, "draft": None if draft is None else draft.fingerprint,
             "pools": [_facts(pool) for pool in pools]}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _facts(pool: StoredPool) -> dict[str, object]:
    layout = pool.layout
    return {"layers": [layout.number_of(layer) for layer in range(layout.num_layers)], "heads": pool.num_kv_heads,
            "draft": pool.is_draft, "form": layout.form, "head_dim": layout.head_dim, "page_size": layout.page_size,
            "dtype": layout.dtype, "scales": layout.scales, "windows": layout.windows,
            "retained_tokens": layout.retained_tokens, "channel_order": layout.channel_order}
