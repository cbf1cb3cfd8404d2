"""The tile of a product that programs may split along its inner dimension."""

from __future__ import annotations

from typing import NamedTuple


class SplitTile(NamedTuple):
    """One program's part of a product: ``rows`` x ``columns`` by steps of ``depth`` over one of ``splits`` of the inner
    dimension, with ``stages`` steps in flight."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
