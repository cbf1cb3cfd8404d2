"""The Triton kernels under Triton's interpreter, against their plain-torch twins, and a whole model over them.

The interpreter is chosen when a kernel file is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run_interpreted(*files: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider",
                           "-p", "baton.tests.helpers.quick_interpreter",
                           *(str(Path(__file__).with_name(file)) for file in files)],
                          env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_kernels_equal_their_twins():
    run_interpreted("kernel_cases.py", "window_cases.py")


def test_sparse_decode_equals_its_twins():
    run_interpreted("sparse_cases.py", "sparse_model_cases.py")


def test_verified_rows_equal_their_twin():
    run_interpreted("verify_cases.py")


def test_rows_go_where_peers_expect_them():
    run_interpreted("all_reduce_cases.py", "gather_scatter_norm_cases.py", "all_to_all_cases.py",
                    "copy_blocks_cases.py")


def test_steps_in_flight_compute_what_they_compute_alone():
    run_interpreted("step_cases.py")


def test_chains_equal_their_twins():
    run_interpreted("chain_cases.py")


def test_captured_chain_steps_read_no_host_copies():
    run_interpreted("captured_chain_cases.py")


def test_draws_equal_the_plain_path():
    run_interpreted("sample_cases.py")


def test_latent_attention_equals_its_twins():
    run_interpreted("mla_cases.py")


def test_mixtures_of_experts_equal_their_twins():
    run_interpreted("moe_cases.py", "mxfp4_cases.py")


def test_products_of_few_rows_and_in_float8_equal_their_twins():
    run_interpreted("small_m_cases.py", "fp8_cases.py", "int8_cases.py")


def test_products_with_packed_integers_equal_their_twins():
    run_interpreted("packed_int_cases.py")


def test_model_over_the_triton_backend():
    run_interpreted("model_cases.py")


def test_rows_do_not_depend_on_their_batch():
    run_interpreted("batch_invariant_cases.py")


def test_decoded_rows_equal_prompt_rows():
    run_interpreted("fixed_split_cases.py")


def test_blocks_of_gguf_files_equal_their_twin():
    run_interpreted("gguf_cases.py")


def test_recurrent_states_equal_their_twins():
    run_interpreted("state_cases.py")
