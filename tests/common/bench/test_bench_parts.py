"""What a kernel or a call is part of, by its name: names as the profilers of both devices give them."""

from __future__ import annotations

import pytest

from baton.common.bench.step_parts import advances, of_frame, of_kernel


@pytest.mark.parametrize("name, part", [
    ("_paged_decode_kernel", "attention"), ("_paged_prefill_kernel", "attention"), ("_mla_decode_kernel", "attention"),
    ("_rope_and_store_kernel", "attention"), ("_merge_splits_kernel", "attention"),
    ("_plan_decode_kernel", "attention"), ("_argmax_of_chunks_kernel", "sampling"), ("_sample_kernel", "sampling"),
    ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
    ("_rmsnorm_kernel", "norm"), ("_silu_and_mul_kernel", "other"), ("Memcpy HtoD (Pinned -> Device)", "other"),
    ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "GEMM"), ("void cutlass::Kernel2<...>", "GEMM"),
    ("_moe_gemm_kernel", "GEMM"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"), ("void gemv2T_kernel_val<...>", "GEMM"),
    ("_block_matmul_kernel", "GEMM"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>", "sampling"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>", "other"),
])
def test_kernels_belong_to_parts(name, part):
    assert of_kernel(name) == part


@pytest.mark.parametrize("name, part", [
    ("baton/common/attention/torch_backend.py(78): run", "attention"), ("/a/b/common/layers/norm.py(20): add", "norm"),
    ("baton/common/layers/linear.py(40): __call__", "GEMM"),
    ("baton/common/sampling/sampler.py(60): launch", "sampling"),
    ("baton/common/layers/mlp.py(30): __call__", "other"), ("baton/common/scheduler/batcher.py(51): next_decode", None),
    ("aten::mm", None),
])
def test_calls_belong_to_parts_by_their_file(name, part):
    assert of_frame(name) == part


def test_a_kernel_that_waits_for_the_one_ahead_is_charged_from_its_end():
    kernels = [(12.0, 30.0, "norm"), (0.0, 10.0, "product"), (9.0, 15.0, "rope"), (40.0, 41.0, "later")]
    assert list(advances(kernels)) == [("product", 10.0), ("rope", 5.0), ("norm", 15.0), ("later", 1.0)]
