"""Records which kernel, grid and tile each launcher chooses on an H200, without one.

    python -m baton.tests.kernels.record_choices [--device NAME]

prints JSON: ``launches`` are descriptions of launches, and ``cases`` name a call of a launcher and list the numbers of
what it launches. Tensors have shapes and no memory; every kernel, and every matrix product of torch, is written down in
place of being run. ``h200_choices.json`` is what the measured launchers chose: test_choices.py holds them to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from baton.kernels.tuning import policy

from . import hopper_cases as hopper
from .h200 import FACTS, NUM_SMS, policy_of_h200
from .hopper_cases import BF16, FP8, FP16, FP32, META, by_block, by_row, fp8, fp32, int32, int64, of

CHOSEN = ("band", "splits", "num_warps", "num_stages", "maxnreg")
"""What a launcher chooses beside the grid, a kernel's constants and the boxes of its descriptors."""
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "linear", "_scaled_mm", "_scaled_mm_v2")


class Recorder(TorchDispatchMode):
    """Takes the place of every kernel's launch and of torch's products."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        JITFunction.run = lambda kernel, *args, grid, warmup, **options: self._launch(kernel, args, grid, options)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            self.launches.append(f"torch.{name} {shapes}")
        return func(*args, **(kwargs or {}))

    def _launch(self, kernel: JITFunction, args: tuple[Any, ...], grid: tuple[int, ...],
                options: dict[str, Any]) -> None:
        named = {param.name: arg for param, arg in zip(kernel.params, args)} | options
        constants = {param.name for param in kernel.params if param.is_constexpr}
        said = []
        for name, value in named.items():
            if name not in constants and name not in CHOSEN and not hasattr(value, "block_shape"):
                continue
            if hasattr(value, "block_shape"):
                said.append(f"{name}={list(value.block_shape)}")
            elif isinstance(value, (bool, int, str)) or value is None:
                said.append(f"{name}={value}")
            elif not isinstance(value, (torch.Tensor, float, tuple)):
                said.append(f"{name}={getattr(value, 'name', value)}")
        self.launches.append(f"{kernel.__name__} {list(grid)} {' '.join(said)}")

    def of(self, call: Callable[[], object]) -> list[str]:
        self.launches = []
        with self:
            result = call()
        if isinstance(result, str):
            self.launches.append(result)
        return self.launches


def emulate(device: str, num_sms: int) -> None:
    """Every tensor is on a Hopper GPU of this name from now on."""
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    answers = {"runs_triton": True, "runs_gluon": True, "is_hopper": True, "num_sms": num_sms,
               "policy_of": policy_of_h200(device, num_sms)}
    for name, module in list(sys.modules.items()):
        if name.startswith("baton.kernels."):
            for function, answer in answers.items():
                if hasattr(module, function):
                    setattr(module, function, lambda *args, answer=answer: answer)
            if hasattr(module, "pdl"):
                module.pdl = lambda tensor: {"PDL": True, "launch_pdl": True}


LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
OTHERS = [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168),  # of two ranks
          (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),  # 70B
          (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),  # Qwen3-0.6B
          (5120, 2048), (2048, 4096), (128, 2048), (768, 4096), (24576, 1536), (4096, 4100), (64, 128), (2048, 8192)]
ROWS = [1, 2, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 192, 224, 225, 256, 257, 512, 1023, 1024, 1040, 4096, 8192]
FEW_ROWS = [1, 16, 64, 128, 256, 2048]


def dense_cases() -> dict[str, Callable[[], object]]:
    from baton.kernels.gemm.dense_matmul import dense_matmul, fuses_residual, matmul_rmsnorm

    def dense(rows: int, out: int, width: int, dtype: torch.dtype = BF16, gated: bool = False,
              bias: bool = False) -> None:
        dense_matmul(of(rows, width, dtype=dtype), of(out, width, dtype=dtype), of(out, dtype=dtype) if bias else None,
                     gated=gated)

    def normed(rows: int, out: int, width: int) -> None:
        x, weight = of(rows, width), of(out, width)
        if fuses_residual(x, weight):
            matmul_rmsnorm(of(rows, out), x, weight, of(out), 1e-5)

    cases: dict[str, Callable[[], object]] = {}
    for shapes, counts in ((LLAMA_8B, ROWS), (OTHERS, ROWS[::2] + [128, 8192])):
        for out, width in shapes:
            for rows in counts:
                cases[f"dense {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: dense(r, o, w)
                if out >= 4 * width or (out, width) == (14336, 4096):
                    cases[f"dense gated {rows} {out}x{width}"] = (
                        lambda r=rows, o=out, w=width: dense(r, o, w, gated=True))
                else:
                    cases[f"normed {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: normed(r, o, w)
    for rows in FEW_ROWS:
        for out, width in ((6144, 4096), (28672, 4096)):
            cases[f"dense bias {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: dense(r, o, w, bias=True)
            cases[f"dense float16 {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: dense(r, o, w, FP16)
            cases[f"dense float32 {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: dense(r, o, w, FP32)
    return cases


def float8_cases() -> dict[str, Callable[[], object]]:
    from baton.kernels.float8.fp8_scaled_matmul import scaled_matmul

    def scaled(rows: int, out: int, width: int) -> None:
        scaled_matmul(fp8(rows, width), fp32(rows, 1), fp8(out, width), fp32(out), BF16)

    cases: dict[str, Callable[[], object]] = {}
    for out, width in [*LLAMA_8B[:4], (1024, 2048), (5120, 2048), (2048, 10944), (57344, 8192)]:
        for rows in (1, 16, 17, 64, 65, 128, 129, 1024):
            cases[f"scaled {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: scaled(r, o, w)
            if rows <= 128:  # the library's call has no shapes without a GPU
                cases[f"block {rows} {out}x{width}"] = lambda r=rows, o=out, w=width: hopper.blocks(r, o, w)
    cases["block 129 4096x4096 48"] = lambda: hopper.blocks(129, 4096, 4096, 48)
    return cases


def packed_int_cases() -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for out, width in LLAMA_8B[:4]:
        for rows in (1, 16, 33, 64, 65, 511, 512):
            for bits in (4, 8):
                cases[f"packed {bits} bits {rows} {out}x{width}"] = (
                    lambda r=rows, o=out, w=width, b=bits: hopper.packed_product(r, o, w, bits=b))
    for rows in (1, 65):
        for group, kind in ((32, "zeros"), (64, "sorted"), (128, "indexed"), (4096, "symmetric")):
            cases[f"packed groups of {group} {rows}"] = (
                lambda r=rows, g=group, k=kind: hopper.packed_product(r, 4096, 4096, group=g, kind=k))
    for tokens in (1, 64, 1024):
        cases[f"packed experts {tokens}"] = lambda t=tokens: hopper.packed_int_experts(t, 128, 2048, 768, 8)
    return cases


def attention_cases() -> dict[str, Callable[[], object]]:
    from baton.kernels.attention.per_head_matmul import per_head_matmul

    cases: dict[str, Callable[[], object]] = {}
    for model, heads, kv_heads, dim in (("Llama-3-8B", 32, 8, 128), ("Qwen3-30B", 32, 4, 128), ("gpt-oss", 64, 8, 64),
                                        ("a rank's", 8, 1, 128), ("wide heads", 16, 8, 256), ("MHA", 32, 32, 128)):
        for requests in (1, 8, 32, 33, 34, 64, 66, 67, 128, 256):
            name = f"{model} {requests}"
            for dtype, cache in ((BF16, None), (BF16, FP8), (FP32, None)):
                if dtype == FP32 and requests > 33:
                    continue
                many = (requests, heads, kv_heads, dim, dtype, cache)
                cases[f"decode {name} {dtype} {cache}"] = lambda m=many: hopper.decode_heads(*m)
                cases[f"decode splits {name} {dtype} {cache}"] = lambda m=many: decode_splits(*m)
            both = (requests, heads, kv_heads, dim, BF16)
            cases[f"decode window {name}"] = lambda m=both: hopper.decode_heads(*m, window=128, sinks=True)
            cases[f"decode current rows {name}"] = lambda m=both: hopper.decode_heads(*m, stores_current_kv=True,
                                                                                      norms=True)
            for width in (2, 4, 8) if requests in (1, 64) else ():
                for cache in (None, FP8):
                    chain = (requests, width, heads, kv_heads, dim, BF16, cache)
                    cases[f"verify {width} rows {name} {cache}"] = lambda m=chain: hopper.verify_heads(*m)
            cases[f"decode inputs not ready {name}"] = lambda m=both: hopper.decode_heads(*m, inputs_ready=False)
        for dtype, cache in ((BF16, None), (BF16, FP8), (FP32, None)):
            cases[f"prefill {model} {dtype} {cache}"] = (
                lambda m=(1000, heads, kv_heads, dim, dtype, cache): hopper.prefill_heads(*m))
    for heads in (8, 16, 32, 128):
        for dtype, cache in ((BF16, None), (BF16, FP8), (FP32, None)):
            cases[f"MLA decode {heads} {dtype} {cache}"] = lambda m=(7, heads, dtype, cache): hopper.decode_latents(*m)
            cases[f"MLA splits {heads} {dtype}"] = lambda m=(heads, dtype.itemsize): mla_splits(*m)
        for width in (2, 4, 8):
            cases[f"MLA verify {heads} {width} rows"] = (
                lambda m=(7, width, heads, BF16): hopper.verify_latents(*m))
        cases[f"MLA prefill {heads}"] = lambda h=heads: hopper.prefill_latents(1000, h, BF16, True)
    for rows in (1, 16, 17, 33, 256, 257):
        cases[f"per head {rows}"] = lambda r=rows: per_head_matmul(of(r, 16, 192)[..., :128], of(16, 128, 512))
        cases[f"per head values {rows}"] = lambda r=rows: per_head_matmul(of(r, 128, 512), of(128, 512, 128))
    return cases


def decode_splits(requests: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
                  cache: torch.dtype | None) -> str:
    """How a step is cut, and whether attention takes the step's own rows in."""
    facts = dim, dtype.itemsize, (cache or dtype).itemsize, requests * kv_heads
    attention = policy.policy_of(META).attention
    return f"{attention.decode_splits(*facts)} stores_current_kv={attention.stores_current_kv(*facts)}"


def mla_splits(heads: int, itemsize: int) -> str:
    attention = policy.policy_of(META).attention
    return f"{attention.mla_splits(heads, itemsize)} {attention.mla_head_block(heads, itemsize)}"


def expert_cases() -> dict[str, Callable[[], object]]:
    layers = {"Qwen3-30B": (128, 2048, 768, 8), "Qwen3-30B of 2": (64, 2048, 768, 8), "TP 2": (128, 2048, 384, 8),
              "V2-Lite": (64, 2048, 1408, 6), "gpt-oss-20b": (32, 2880, 2880, 4), "V3 of 8": (32, 7168, 2048, 8)}
    cases: dict[str, Callable[[], object]] = {}
    for name, (places, hidden, size, choices) in layers.items():
        for tokens in (1, 8, 16, 64, 100, 256, 512, 1024, 4096, 8192):
            one = (tokens, places, hidden, size, choices)
            cases[f"experts {name} {tokens}"] = lambda m=one: hopper.experts(*m)
            scales = (places, hidden, size)
            cases[f"experts by block {name} {tokens}"] = lambda m=one, s=scales: hopper.experts(*m, BF16, by_block(*s))
            if tokens in (8, 1024):
                cases[f"experts by row {name} {tokens}"] = lambda m=one, s=scales: hopper.experts(*m, BF16, by_row(*s))
                cases[f"experts float32 {name} {tokens}"] = lambda m=one: hopper.experts(*m, FP32)
                cases[f"experts clamped {name} {tokens}"] = lambda m=one: hopper.experts(*m, clamped=True)
    return cases


def other_cases() -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {
        name: call for name, call in hopper.CASES.items()
        if name.startswith(("rmsnorm", "fp8_rmsnorm", "quantize", "rope", "mla_rope", "silu", "gelu", "moe_topk",
                            "copy", "dequantize", "gather", "all_reduce", "reduce_scatter", "all_gather", "rmsnorm_all",
                            "all_to_all", "split_k", "scale_by"))}
    for rows in (1, 8, 100, 256):
        cases[f"argmax {rows}"] = lambda r=rows: hopper.argmax(fp32(r, 128256), int64(r))
        cases[f"sample {rows}"] = lambda r=rows: hopper.drawn(fp32(r, 128256), True)
    for tokens in (1, 64, 1000, 8192):
        for float8 in (False, True):
            cases[f"all-to-all {tokens} {float8}"] = lambda t=tokens - 1, f=float8: hopper.exchanged(t, 2048, 2, f)
    for rows in (1, 64, 128, 256, 512):
        cases[f"all-reduce {rows}"] = lambda r=rows: hopper.summed_and_normed(min(r, 128), 4096, 2, r > 64)
    cases["plan of many"] = lambda: hopper.plan_decode(int32(257), int32(256), 16, 8, NUM_SMS, 8192)
    return cases


def record(device: str = FACTS.name, num_sms: int = NUM_SMS) -> dict[str, Any]:
    """The content of ``h200_choices.json``, for a Hopper GPU of any name."""
    cases = dense_cases() | float8_cases() | attention_cases() | expert_cases() | other_cases() | packed_int_cases()
    for module in ("gemm.dense_warp_specialized", "gemm.persistent_matmul", "gemm.split_k_warp_specialized",
                   "moe.moe_warp_specialized"):
        import_module(f"baton.kernels.{module}")  # before ``emulate`` replaces what they ask

    emulate(device, num_sms)
    recorder, launches = Recorder(), dict[str, int]()
    chosen = {name: [launches.setdefault(launch, len(launches)) for launch in recorder.of(call)]
              for name, call in cases.items()}
    return {"launches": list(launches), "cases": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=FACTS.name, help="torch's name of the GPU")
    parser.add_argument("--num-sms", type=int, default=NUM_SMS)
    args = parser.parse_args()
    made = record(args.device, args.num_sms)
    print('{"launches": [\n' + ",\n".join(map(json.dumps, made["launches"])) + '\n],\n"cases": {\n'
          + ",\n".join(f"{json.dumps(name)}: {numbers}" for name, numbers in made["cases"].items()) + "\n}}")


if __name__ == "__main__":
    main()
