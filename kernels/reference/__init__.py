"""Plain-torch twins of the kernels: what each computes, and what a CPU runs.

Arithmetic is in float32 and rounded to the input's type once, at the end, as in the kernels.
"""

from .attention import (
    block_lengths,
    dequantize_pages,
    move_slots,
    paged_attention,
    plan_decode,
    rope_and_store,
    rotate,
    scale_by_sinks,
    visible_by_words,
)
from .comm import (
    all_reduce,
    all_reduce_rmsnorm,
    all_to_all_combine,
    all_to_all_dispatch,
    reduce_scatter_rmsnorm,
    rmsnorm_all_gather,
)
from .fixed_rows import batch_invariant_matmul
from .float8 import FP8_LARGEST, FP8_LEAST, quantize_by, quantize_groups
from .gemm import block_matmul, per_head_matmul, scaled_matmul, small_m_matmul
from .gguf import dequantize_gguf
from .int8 import INT8_LEAST, int8_matmul, quantize_int8
from .mla import mla_attention, mla_prefill, mla_rope_and_store
from .moe import group_scores, limit_to_groups, moe_align, moe_experts, moe_spans, moe_topk
from .mxfp4 import (
    MXFP4_MIN_WORDS,
    MXFP4_VALUES,
    dequantize_mxfp4,
    mxfp4_block,
    mxfp4_experts,
    pack_mxfp4,
    pack_mxfp4_scales,
)
from .packed_ints import (
    TABLES,
    dequantize_ints,
    pack_ints,
    packed_int_matmul,
    put_scales,
    put_zeros,
    quarter_of,
    scale_words,
    unpack_ints,
)
from .rows import argmax, copy_blocks, gather_rows, gelu_and_mul, joined_norms, rmsnorm, silu_and_mul
from .sparse import label_scores, order_channels, plan_sparse_decode, select_tokens, sparse_decode
from .speculative import accept_chains, place_chains, place_rows

__all__ = [
    "FP8_LARGEST", "FP8_LEAST", "INT8_LEAST", "MXFP4_MIN_WORDS", "MXFP4_VALUES", "TABLES", "accept_chains",
    "all_reduce", "all_reduce_rmsnorm", "all_to_all_combine", "all_to_all_dispatch", "argmax", "batch_invariant_matmul",
    "block_lengths", "block_matmul", "copy_blocks", "dequantize_gguf", "dequantize_ints", "dequantize_mxfp4",
    "dequantize_pages", "gather_rows", "gelu_and_mul", "group_scores", "int8_matmul", "joined_norms",
    "label_scores", "limit_to_groups", "mla_attention", "mla_prefill", "mla_rope_and_store", "moe_align",
    "moe_experts", "moe_spans", "moe_topk", "move_slots", "mxfp4_block", "mxfp4_experts", "order_channels", "pack_ints",
    "pack_mxfp4", "pack_mxfp4_scales", "packed_int_matmul", "paged_attention", "per_head_matmul", "place_chains",
    "place_rows",
    "plan_decode", "plan_sparse_decode", "quantize_by", "quantize_groups", "quantize_int8", "reduce_scatter_rmsnorm",
    "rmsnorm", "rmsnorm_all_gather", "rope_and_store", "rotate", "scale_by_sinks", "scaled_matmul", "select_tokens",
    "put_scales", "put_zeros", "quarter_of", "scale_words", "silu_and_mul", "small_m_matmul", "sparse_decode",
    "unpack_ints", "visible_by_words",
]
