"""Flags of the model: checkpoint, type, device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...api.errors import ConfigError
from ...registry import Choices
from ..cli import flag
from ..load_format import LOAD_FORMATS
from ..quantization import QUANTIZATIONS
from ..rules import Rule, ServerRule, at_least


@dataclass(frozen=True)
class ModelArgs:
    model_path: str = flag(required=True, names=("--model",), help=(
        "local checkpoint folder, Hugging Face hub id, or 'tinychat' for the chat model that ships with Baton"))
    tokenizer_path: str | None = flag(None, help="tokenizer folder or hub id, when it is not the model's")
    revision: str | None = flag(None, help="hub revision of the model")
    model_fingerprint: str | None = flag(None, help=(
        "name of the weights in place of a fingerprint of the checkpoint: prefill and decode servers are paired when "
        "theirs are equal, so give two equivalent checkpoints (a model and its copy in float8) the same name; "
        "weights that are loaded at run time have a fingerprint of their own again"))
    served_model_name: str | None = flag(None, help="model name in the API; by default --model-path")
    load_format: str = flag("auto", choices=Choices.of(LOAD_FORMATS), help=(
        "source of the weights: auto is safetensors, or torch's .bin files (pt) where there are no others; dummy fills "
        "them with random values, for benchmarks without a checkpoint"))
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", help="type of weights and KV cache; auto is the checkpoint's on a GPU and float32 on a CPU")
    quantization: str | None = flag(None, choices=Choices.of(QUANTIZATIONS), help=(
        "format of linear layers' weights: fp8 has weights and activations in float8, with a scale for each output and "
        "each token, fp8_per_tensor one for each projection, fp8_per_block one for blocks of 128 x 128; checkpoints "
        "that are quantized need no flag"))
    model_impl: Literal["baton", "transformers"] = flag("baton", help=(
        "implementation of the model: Baton's own, or transformers' code over Baton's attention, for architectures "
        "that only transformers has; on one rank, without CUDA graphs"))
    context_length: int | None = flag(None, help="longest prompt plus output in tokens; by default the model's")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="where the engine runs; auto prefers a GPU")
    base_gpu_id: int = flag(0, help="index of the first GPU to use; tensor-parallel ranks take the following ones")
    is_embedding: bool = flag(False, help="serve embeddings (or a classifier's scores) instead of generating")
    pooling: Literal["auto", "last", "mean"] = flag("auto", help=(
        "hidden state that becomes the embedding: the last token's, or the mean of all; auto reads the checkpoint's "
        "1_Pooling/config.json, and is last without it"))
    random_seed: int = flag(0, help="seed of dummy weights and of unseeded sampling")
    return_original_logprob: bool = flag(False, help=(
        "return log-probabilities of the output before temperature (penalties and bias count in both cases)"))
    chat_template: str | None = flag(None, help=(
        "jinja file, SGLang's JSON conversation template, or the name of a template that ships with Baton, in place of "
        "the checkpoint's chat template"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.model.is_embedding and not c.role.serves_alone,
             "--is-embedding needs a unified server: leave --disaggregation-mode at null."),
        Rule(lambda c: c.model.model_impl == "transformers" and c.parallel.world_size > 1,
             "--model-impl transformers computes on one rank: leave --tp-size and --pp-size out."),
        Rule(lambda c: c.model.model_impl == "transformers" and c.model.quantization is not None,
             "--model-impl transformers does not quantize: leave --quantization out."),
        Rule(lambda c: c.model.model_impl == "transformers" and c.answers.enable_return_hidden_states,
             "--model-impl transformers returns no hidden states: leave --enable-return-hidden-states out."),
        Rule(lambda c: c.model.model_impl == "transformers" and c.speculative.is_device,
             "--model-impl transformers shares no hidden states, embedding or head with a draft model: leave "
             "--speculative-algorithm {speculative.speculative_algorithm} out, or use NGRAM."),
        Rule(lambda c: c.model.is_embedding and c.parallel.pp_size > 1,
             "--is-embedding does not work across the stages of --pp-size: leave one of them out."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "context_length")
        at_least(self, 0, "base_gpu_id")
        if not -(2**63) <= self.random_seed < 2**63:
            raise ConfigError(f"--random-seed must fit into 64 bits, {self.random_seed} does not.")
