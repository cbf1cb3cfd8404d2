"""Tiles of experts: measured ones by device, shape and the nearest number of tokens; a rule where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.kernels.tuning.moe import Tile, Tiles, default_tiles, shape_key, warp_specialized_tiles
from baton.kernels.tuning.policy import FOLDER, Policy, write_moe_tiles

from .h200 import FACTS, policy_of_h200

FEW = Tiles(Tile(16, 32, 64, 1, 4, 4), Tile(16, 64, 64, 1, 4, 4))
MANY = Tiles(Tile(64, 128, 64, 8, 8, 3), Tile(64, 64, 128, 8, 4, 3))


@pytest.fixture
def tiles_for(tmp_path):
    """Chooses for a device of this name what a file in a folder of ours says."""
    def chosen(tokens, experts, hidden, size, choices, dtype, name, warp_specialized=False):
        policy = Policy.load(replace(FACTS, name=name), tmp_path)
        return policy.moe.tiles(tokens, experts, hidden, size, choices, dtype, warp_specialized)

    chosen.folder = tmp_path
    return chosen


def test_the_nearest_measured_tiles(tiles_for):
    key = shape_key(128, 2048, 768, 8, torch.bfloat16)
    write_moe_tiles("Some GPU", {key: {4096: MANY, 16: FEW}}, tiles_for.folder)
    assert (tiles_for.folder / "Some_GPU.json").exists()
    layer = (128, 2048, 768, 8)
    assert tiles_for(1, *layer, torch.bfloat16, "Some GPU") == FEW
    assert tiles_for(2000, *layer, torch.bfloat16, "Some GPU") == FEW
    assert tiles_for(3000, *layer, torch.bfloat16, "Some GPU") == MANY
    for other in ((64, 2048, 768, 8), (128, 2048, 768, 4)):
        assert tiles_for(16, *other, torch.bfloat16, "Some GPU") == default_tiles(16 * other[3] / other[0],
                                                                                  torch.bfloat16)
    assert tiles_for(16, *layer, torch.float16, "Some GPU") == tiles_for(16, *layer, torch.bfloat16, "Another GPU")


def test_warp_specialized_products_where_they_run(tiles_for):
    """Measured or by the rule; a layer that they cannot compute has the rule's others."""
    groups = warp_specialized_tiles(torch.bfloat16)
    key = shape_key(128, 2048, 768, 8, torch.bfloat16)
    write_moe_tiles("Some GPU", {key: {4096: groups, 16: FEW}}, tiles_for.folder)
    known, other = (128, 2048, 768, 8, torch.bfloat16, "Some GPU"), (64, 2048, 768, 8, torch.bfloat16, "Some GPU")
    assert tiles_for(4000, *known, warp_specialized=True) == groups and groups.is_warp_specialized
    assert tiles_for(4000, *known) == default_tiles(4000 / 16, torch.bfloat16)
    assert tiles_for(16, *known) == tiles_for(16, *known, warp_specialized=True) == FEW
    assert tiles_for(8192, *other, warp_specialized=True) == groups
    assert tiles_for(8192, *other) == default_tiles(1024, torch.bfloat16) != groups
    assert not tiles_for(16, *other, warp_specialized=True).is_warp_specialized


def test_the_rule_grows_with_the_rows_of_an_expert():
    rows = [default_tiles(each, torch.bfloat16).gate_up.rows for each in (0.1, 16, 17, 33, 97, 5000)]
    assert rows == [16, 16, 32, 128, 128, 128]
    for each in (1, 30, 90, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            tiles = default_tiles(each, dtype)
            shared = [t.stages * dtype.itemsize * t.depth * (t.rows + factor * t.columns)
                      for t, factor in ((tiles.gate_up, 2), (tiles.down, 1))]
            assert max(shared) <= 160 * 1024  # an A100's; an H200 has 227 KiB


def test_tiles_are_written_beside_what_a_file_has(tmp_path):
    file = tmp_path / "NVIDIA_H200.json"
    file.write_text((FOLDER / file.name).read_text())
    before = Policy.load(FACTS, tmp_path)
    write_moe_tiles(FACTS.name, before.moe.numbers.tiles, tmp_path)
    assert file.read_text() == (FOLDER / file.name).read_text()


def test_shipped_files_can_be_read():
    for file in FOLDER.glob("*.json"):
        assert policy_of_h200(file.stem.replace("_", " ")).moe.numbers.tiles
