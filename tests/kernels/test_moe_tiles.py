"""Tables of measured tiles: found by device, shape and the nearest number of tokens; a rule where there is none."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.moe import moe_tiles
from baton.kernels.moe.moe_tiles import (
    Tile,
    Tiles,
    default_tiles,
    shape_key,
    table,
    tiles_for,
    to_json,
    warpgroup_tiles,
)

FEW = Tiles(Tile(16, 32, 64, 1, 4, 4), Tile(16, 64, 64, 1, 4, 4))
MANY = Tiles(Tile(64, 128, 64, 8, 8, 3), Tile(64, 64, 128, 8, 4, 3))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(moe_tiles, "FOLDER", tmp_path)
    table.cache_clear()
    yield tmp_path
    table.cache_clear()


def test_the_nearest_measured_tiles(folder):
    key = shape_key(128, 2048, 768, 8, torch.bfloat16)
    (folder / "Some_GPU.json").write_text(to_json({key: {4096: MANY, 16: FEW}}))
    layer = (128, 2048, 768, 8)
    assert tiles_for(1, *layer, torch.bfloat16, "Some GPU") == FEW
    assert tiles_for(2000, *layer, torch.bfloat16, "Some GPU") == FEW
    assert tiles_for(3000, *layer, torch.bfloat16, "Some GPU") == MANY
    for other in ((64, 2048, 768, 8), (128, 2048, 768, 4)):
        assert tiles_for(16, *other, torch.bfloat16, "Some GPU") == default_tiles(16 * other[3] / other[0],
                                                                                  torch.bfloat16)
    assert tiles_for(16, *layer, torch.float16, "Some GPU") == tiles_for(16, *layer, torch.bfloat16, "Another GPU")


def test_warp_groups_where_they_run(folder):
    """Measured or by the rule; a layer that they cannot compute has the rule's others."""
    groups = warpgroup_tiles(torch.bfloat16)
    key = shape_key(128, 2048, 768, 8, torch.bfloat16)
    (folder / "Some_GPU.json").write_text(to_json({key: {4096: groups, 16: FEW}}))
    known, other = (128, 2048, 768, 8, torch.bfloat16, "Some GPU"), (64, 2048, 768, 8, torch.bfloat16, "Some GPU")
    assert tiles_for(4000, *known, warpgroups=True) == groups and groups.by_warpgroups
    assert tiles_for(4000, *known) == default_tiles(4000 / 16, torch.bfloat16)
    assert tiles_for(16, *known) == tiles_for(16, *known, warpgroups=True) == FEW
    assert tiles_for(8192, *other, warpgroups=True) == groups
    assert tiles_for(8192, *other) == default_tiles(1024, torch.bfloat16) != groups
    assert not tiles_for(16, *other, warpgroups=True).by_warpgroups


def test_the_rule_grows_with_the_rows_of_an_expert():
    rows = [default_tiles(each, torch.bfloat16).gate_up.rows for each in (0.1, 16, 17, 33, 97, 5000)]
    assert rows == [16, 16, 32, 128, 128, 128]
    for each in (1, 30, 90, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            tiles = default_tiles(each, dtype)
            shared = [t.stages * dtype.itemsize * t.depth * (t.rows + factor * t.columns)
                      for t, factor in ((tiles.gate_up, 2), (tiles.down, 1))]
            assert max(shared) <= 160 * 1024  # an A100's; an H200 has 227 KiB


def test_shipped_tables_can_be_read():
    for file in moe_tiles.FOLDER.glob("*.json"):
        assert table(file.stem.replace("_", " "))
