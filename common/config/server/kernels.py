"""Flags of kernels, attention backends and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule

if TYPE_CHECKING:
    from ...attention.base import AttentionFactory
    from ...attention.mla.base import LatentFactory
    from ...sampling.sampling_backend import SamplingFactory

ATTENTION_BACKENDS: Registry[AttentionFactory] = Registry("attention backend", "baton.common.attention")
LATENT_BACKENDS: Registry[LatentFactory] = Registry("backend of multi-head latent attention",
                                                    "baton.common.attention.mla")
SAMPLING_BACKENDS: Registry[SamplingFactory] = Registry("sampling backend", "baton.common.sampling")
ATTENTION_CHOICES = Choices.of(ATTENTION_BACKENDS, LATENT_BACKENDS, others=("auto",))
SAMPLING_CHOICES = Choices.of(SAMPLING_BACKENDS, others=("auto",))
_FIXED_ORDER = ("auto", "triton", "torch")


@dataclass(frozen=True)
class KernelArgs:
    attention_backend: str = flag("auto", choices=ATTENTION_CHOICES, help=(
        "auto is flashinfer on a GPU where it is installed and supports the model, else triton; torch on a CPU. At a "
        "machine's first start auto computes prompts by triton until flashinfer is compiled, for which flashinfer "
        "waits"))
    decode_attention_backend: str = flag("auto", choices=ATTENTION_CHOICES, help=(
        "backend of decode steps; auto is triton on a GPU, else that of --attention-backend"))
    sampling_backend: str = flag("auto", choices=SAMPLING_CHOICES, help=(
        "triton samples by kernels that sort nothing; auto is triton on a GPU where a trial gives torch's tokens"))
    disable_cuda_graph: bool = flag(False, help="launch a decode step's kernels one by one")
    disable_custom_all_reduce: bool = flag(False, help=(
        "use NCCL for all all-reduces of a host's GPUs, instead of writing small ones into peer memory"))
    cuda_graph_max_bs: int = flag(256, help="largest decode batch that runs as a CUDA graph")
    disable_piecewise_cuda_graph: bool = flag(False, help="launch the kernels of prefill steps one by one")
    piecewise_cuda_graph_max_tokens: int = flag(8192, help=(
        "largest prefill step that may run as piecewise CUDA graphs (all but its attention)"))
    piecewise_cuda_graph_tokens: tuple[int, ...] = flag((), help=(
        "sizes in tokens to capture, instead of those at which a trial finds that the device waits for the host"))
    cuda_graph_bs: tuple[int, ...] = flag((), help=(
        "decode batch sizes to capture, instead of a list up to --cuda-graph-max-bs"))
    disable_cuda_graph_padding: bool = flag(False, help=(
        "run a decode batch as a CUDA graph only where its size is captured, and launch kernels one by one for others, "
        "instead of padding them to the next size"))
    disable_decode_cuda_graph: bool = flag(False, help=(
        "launch a decode step's kernels one by one, and prefill steps as --disable-piecewise-cuda-graph says"))
    enable_fp32_lm_head: bool = flag(False, help=(
        "compute logits in float32, of hidden states and a head in the model's type, as trainers do"))
    enable_tf32_matmul: bool = flag(False, help=(
        "multiply matrices in float32 by a GPU's tensor cores, with 10 bits of mantissa"))
    enable_deterministic_inference: bool = flag(False, help=(
        "give a request the same tokens and log-probabilities, bit by bit, whatever else is computed with it, in "
        "chunks of any size, from the prefix cache or not; slower. Requests without a seed have the seed 42"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.kernels.enable_fp32_lm_head and c.model.is_embedding,
             "--enable-fp32-lm-head is for servers that generate: leave it out with --is-embedding."),
        Rule(lambda c: c.kernels.enable_fp32_lm_head and c.model.model_impl == "transformers",
             "--enable-fp32-lm-head is for Baton's own heads: leave --model-impl transformers out."),
        Rule(lambda c: c.kernels.enable_fp32_lm_head and c.kernels.enable_deterministic_inference,
             "--enable-fp32-lm-head multiplies by a library whose order of sums depends on the batch: leave "
             "--enable-deterministic-inference out."),
        Rule(lambda c: c.kernels.enable_tf32_matmul and c.kernels.enable_deterministic_inference,
             "--enable-deterministic-inference multiplies by kernels of its own: leave --enable-tf32-matmul out."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and c.model.is_embedding,
             "--enable-deterministic-inference is for servers that generate: leave it out with --is-embedding."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and c.model.model_impl == "transformers",
             "--enable-deterministic-inference fixes the order of Baton's own layers: leave --model-impl transformers "
             "out."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and not {
            c.kernels.attention_backend, c.kernels.decode_attention_backend} <= set(_FIXED_ORDER),
            "--enable-deterministic-inference needs attention that adds up in a fixed order: leave "
            "--attention-backend and --decode-attention-backend at auto, or set them to triton."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and c.dp_size > 1,
             "--enable-deterministic-inference does not hold between attention groups, which exchange rows by the size "
             "of a step: leave --enable-dp-attention out, and start several servers behind the router."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and c.parallel.moe_a2a_backend != "none",
             "--enable-deterministic-inference adds up experts in the order of ranks: leave --moe-a2a-backend at "
             "none."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and (
            c.parallel.enable_eplb or c.parallel.ep_num_redundant_experts),
            "--enable-deterministic-inference needs experts that stay on their ranks: leave --enable-eplb and "
            "--ep-num-redundant-experts out."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and min(
            c.speculative.speculative_accept_threshold_single, c.speculative.speculative_accept_threshold_acc) < 1,
            "--enable-deterministic-inference gives the tokens of plain decoding: leave "
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc at 1."),
        Rule(lambda c: c.kernels.enable_deterministic_inference
             and c.speculative.speculative_simulate_acceptance is not None,
             "--enable-deterministic-inference gives the tokens of plain decoding: leave "
             "--speculative-simulate-acceptance out."),
        Rule(lambda c: c.kernels.enable_deterministic_inference and c.speculative.drafts_trees,
             "--enable-deterministic-inference verifies chains, whose keys lie in the order of positions: leave "
             "--speculative-eagle-topk and --speculative-ngram-max-bfs-breadth at 1."),
    )

    def __post_init__(self) -> None:
        for name in ("cuda_graph_bs", "piecewise_cuda_graph_tokens"):
            least = min(getattr(self, name), default=1)
            if least < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {least}.")
