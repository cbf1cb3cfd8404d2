"""The kernel files where Triton is not installed: importable, and their launchers compute with the twins."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # what an import of a missing package finds
import torch
from baton.kernels import _triton
from baton.kernels.attention import paged_decode, paged_prefill, rope_and_store
from baton.kernels.moe import moe_experts
from baton.kernels.rowwise import rmsnorm, silu_and_mul
from baton.common.distributed import all_to_all
assert not _triton.AVAILABLE and not _triton.INTERPRETED
y, total = rmsnorm.rmsnorm(torch.ones(2, 4), torch.full((4,), 3.0), 0.0, torch.ones(2, 4))
assert torch.equal(y, torch.full((2, 4), 3.0)) and torch.equal(total, torch.full((2, 4), 2.0))
assert silu_and_mul.silu_and_mul(torch.zeros(1, 6)).shape == (1, 3)
made = moe_experts.moe_experts(torch.ones(1, 2), torch.ones(3, 8, 2), torch.ones(3, 2, 4), torch.tensor([[2, 5]]),
                               torch.ones(1, 2))
assert torch.allclose(made, torch.full((1, 2), 4 * 2 * torch.nn.functional.silu(torch.tensor(2.0)).item()))
"""


def test_kernels_run_without_triton():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60,
                          env={"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)})
    assert done.returncode == 0, done.stderr
