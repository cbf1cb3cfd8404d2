"""The order of rows of quantized queries and keys whose neighbouring values are turned together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.models.registry import load_model_spec
from baton.common.weights.interleaved_rotary import halves_of
from baton.common.weights.lazy import InMemory

HEADS, HEAD_DIM = 2, 4
ORDER = [0, 2, 1, 3, 4, 6, 5, 7]


def read(kind, tensor):
    spec = replace(load_model_spec(ModelArgs("tinychat")), num_heads=HEADS, num_kv_heads=1, head_dim=HEAD_DIM)
    (found,) = halves_of(spec, HEAD_DIM)(f"layers.0.q_proj.{kind}", InMemory(tensor))
    return found[1][:]


@pytest.mark.parametrize("kind", ["weight", "weight_packed", "weight_scale", "absmax", "SCB", "bias"])
def test_what_has_a_row_an_output_is_reordered(kind):
    rows = torch.arange(8.0) if kind in ("SCB", "bias") else torch.arange(24.0).view(8, 3)
    assert torch.equal(read(kind, rows), rows[ORDER])


@pytest.mark.parametrize("kind", ["g_idx", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point",
                                  "activation_scale", "weight_scale_inv", "k_scale"])
def test_what_belongs_to_inputs_stays(kind):
    assert torch.equal(read(kind, torch.arange(8.0)), torch.arange(8.0))


def test_packed_outputs_are_refused():
    with pytest.raises(ConfigError, match="q_proj.qweight packs outputs of a projection .* use an unquantized"):
        read("qweight", torch.zeros(3, 1))
