"""The rotary tables of a model's layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...config.model import ModelSpec
from ...config.rope import RotarySpec
from ...layers.rotary import rotary_table
from .blocks import Blocks


def rotary_tables(blocks: Blocks, spec: ModelSpec, layers: Iterable[int],
                  device: torch.device) -> list[torch.Tensor | None]:
    """Returns the table of each of ``layers``, see ``rotary_table``; None for layers without rotary embeddings. Layers
    with equal ones share a table."""
    made: list[tuple[RotarySpec, torch.Tensor]] = []
    tables: list[torch.Tensor | None] = []
    for layer in layers:
        rope = blocks.rope if blocks.rope_of is None else blocks.rope_of(layer)
        if rope is None:
            tables.append(None)
            continue
        table = next((table for known, table in made if known == rope), None)
        if table is None:
            dim = blocks.rotary_dim or rope.rotary_dim(spec.head_dim)
            table = rotary_table(rope, dim, spec.context_length, device)
            made.append((rope, table))
        tables.append(table)
    return tables
