"""A family that user code registers, with partial rotary embeddings, on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from baton.tests.gpu.whole_models import check_bfloat16, check_graphs_and_overlap
from baton.tests.helpers.nemotron_models import save_nemotron

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("backend", ["triton", *(["flashinfer"] if find_spec("flashinfer") else [])])
def test_bfloat16_stays_as_close_as_transformers(tmp_path, backend):
    model = save_nemotron(tmp_path, **SHAPE)
    check_bfloat16(model, tmp_path, backend)


def test_graphs_and_overlap_change_no_token(tmp_path):
    save_nemotron(tmp_path, **SHAPE)
    check_graphs_and_overlap(tmp_path)
