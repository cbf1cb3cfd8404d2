"""Mixtures of experts over several GPUs: tensor and expert parallelism and data-parallel attention beside each other.

    python -m baton.tests.bench.many_gpus [--models qwen3-30b-a3b,deepseek-v2-lite] [--settings tp,tp+ep,dp+ep]
        [--layers 16] [--gpus 2] [--quantization none,fp8_per_block] [--batches 1,32,256] [--seconds 60]
        [--server-flags "..."] [--rehearse 40] [--out figures.json]

Engines of dummy weights, one after the other in the same processes, one process a GPU, without the servers' fronts:
prompt tokens a second of prompts of 4,096, the share that exchanges between GPUs have in such a step, and decode steps
of so many requests in all, with overlap and CUDA graphs. Beside them what the GPUs can do at most. ``--layers`` cuts
the models; ``--seconds`` ends the table before an engine that would come too late. With ``--rehearse`` all engines
are first built beside each other, of two layers, so that a machine whose Triton has compiled nothing compiles on all
its cores. ``many_gpus_rank`` is what a rank does.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
         "vocab_size": 512, "eos_token_id": 1}
MODELS = ("qwen3-30b-a3b", "deepseek-v2-lite", "small-qwen3-moe", "small-deepseek")
"""The small ones are for a look at this program on a CPU."""


def shape_of(model: str) -> dict[str, Any]:
    from .mla_decode import V2_LITE

    return {
        "qwen3-30b-a3b": QWEN3_30B,
        "deepseek-v2-lite": V2_LITE,
        "small-qwen3-moe": QWEN3_30B | SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
                                                "num_key_value_heads": 2, "head_dim": 16},
        "small-deepseek": V2_LITE | SMALL | {"n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
                                             "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                                             "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_scaling": None},
    }[model]


def setting_flags(name: str, gpus: int) -> list[str]:
    """Of a server: ``tp``, ``dp``, ``tp+ep`` or ``dp+ep``; behind that ``+a2a``, ``+ll`` or ``+peer``, ``+two`` batches
    (``two8``: exchanges have 8 multiprocessors, ``two0``: as ever), ``+eager`` for prompts without CUDA graphs, and
    ``+chunk16384``; ``+prompts`` decodes nothing.
    """
    parts, count = name.split("+"), str(gpus)
    return ["--tp-size", count, *(["--dp-size", count, "--enable-dp-attention"] if "dp" in parts else []),
            *(["--ep-size", count] if "ep" in parts else []),
            *(["--moe-a2a-backend", "alltoall"] if "a2a" in parts else []),
            *(["--moe-a2a-backend", "low_latency"] if "ll" in parts else []),
            *(["--moe-a2a-backend", "peer"] if "peer" in parts else []),
            *(["--enable-dp-lm-head"] if "head" in parts else []),
            *(["--enable-two-batch-overlap"] if "+two" in name else []),
            *(["--disable-piecewise-cuda-graph"] if "eager" in parts else []),
            *(word for part in parts if part.startswith("chunk")
              for word in ("--chunked-prefill-size", part[5:], "--max-prefill-tokens", part[5:]))]


def run_rank(*given: Any) -> None:
    """A rank's process. The one that starts it imports nothing that takes seconds."""
    from .many_gpus_rank import rank_main

    rank_main(*given)


def run_rehearsal(*given: Any) -> None:
    from .many_gpus_rank import rehearse

    rehearse(*given)


@contextmanager
def ranks(target: Callable[..., None], gpus: int, *given: Any) -> Iterator[list[BaseProcess]]:
    """Processes of ``target(rank, *given)``, which end with this."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=target, args=(rank, *given)) for rank in range(gpus)]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def rehearsals(cases: list[dict[str, str]], args: argparse.Namespace) -> None:
    """All cases beside each other with few layers, for ``args.rehearse`` seconds at most."""
    until = time.time() + args.rehearse
    with ExitStack() as stack:
        started = []
        for case in cases if args.rehearse else []:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            started.append(stack.enter_context(ranks(run_rehearsal, args.gpus, case, args, folder)))
        while any(map(at_work, started)) and time.time() < until:
            time.sleep(0.1)


def at_work(group: list[BaseProcess]) -> bool:
    """Whether some are, and none has failed, which the others would wait for."""
    return any(process.is_alive() for process in group) and not any(process.exitcode for process in group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b,deepseek-v2-lite", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--settings", default="tp,tp+ep,dp+ep", help="tp, dp, tp+ep, dp+ep, dp+ep+a2a, tp+chunk16384")
    parser.add_argument("--quantization", default="none", help="none, fp8, fp8_per_block, with commas between")
    parser.add_argument("--cases", default="", help="MODEL/QUANTIZATION/SETTING,..., in place of the three above")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, help="of the models, in place of all")
    parser.add_argument("--batches", default="1,32,256", help="requests that decode, on all GPUs; empty: prompts only")
    parser.add_argument("--prompts", type=int, default=16, help="that are measured, over all GPUs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--server-flags", default="", help="further flags of every engine, in one word")
    parser.add_argument("--host", action="store_true", help="also tell what of the host's time a prefill takes")
    parser.add_argument("--rehearse", type=float, default=0, help="seconds at most to compile all engines' kernels")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no engine later than this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.command = sys.argv[1:]
    began = time.time()
    named = [case.split("/") for case in args.cases.split(",") if case]
    cases = [
        {"model": model, "setting": setting, "quantization": quantization}
        for model, quantization, setting in named or itertools.product(
            args.models.split(","), args.quantization.split(","), args.settings.split(","))]
    rehearsed = multiprocessing.get_context("spawn").Event()
    with (tempfile.TemporaryDirectory() as folder,
          ranks(run_rank, args.gpus, cases, args, folder, began, rehearsed) as started):
        rehearsals(cases, args)
        rehearsed.set()
        while at_work(started):
            time.sleep(0.1)
        failed = any(process.exitcode for process in started)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
