"""Plain-torch twins of the kernels: what each computes, and what a CPU runs.

Arithmetic is in float32 and rounded to the input's type once, at the end, as in the kernels.
"""

from .attention import paged_attention, plan_decode, rope_and_store, rotate, scale_by_sinks, widen_pages
from .comm import peer_combine, peer_dispatch, peer_norm_gather, peer_scatter_norm, peer_sum, peer_sum_norm
from .float8 import FP8_LARGEST, FP8_LEAST, quantize_by, quantize_groups
from .gemm import block_matmul, per_head_matmul, scaled_matmul, skinny_matmul
from .mla import mla_attention, mla_prefill, mla_rope_and_store
from .moe import group_scores, limit_to_groups, moe_align, moe_experts, moe_spans, moe_topk
from .rows import copy_blocks, greatest, rmsnorm, silu_and_mul

__all__ = [
    "FP8_LARGEST", "FP8_LEAST", "block_matmul", "copy_blocks", "greatest", "group_scores", "limit_to_groups",
    "mla_attention", "mla_prefill", "mla_rope_and_store", "moe_align", "moe_experts", "moe_spans", "moe_topk",
    "paged_attention", "peer_combine", "peer_dispatch", "peer_norm_gather", "peer_scatter_norm", "peer_sum",
    "peer_sum_norm", "per_head_matmul", "plan_decode", "quantize_by", "quantize_groups", "rmsnorm",
    "rope_and_store", "rotate", "scale_by_sinks", "scaled_matmul", "silu_and_mul", "skinny_matmul", "widen_pages",
]
