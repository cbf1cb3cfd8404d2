"""Flags of sparse decode attention: "Post-Training Sparse Attention with Double Sparsity" (arXiv:2408.07092)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules


@dataclass(frozen=True)
class SparsityArgs:
    enable_double_sparsity: bool = flag(False, help=(
        "decode steps of long contexts read only the tokens with the largest approximate scores, which some channels "
        "of each key give; both servers of a pair need it, with the same channels. Answers are not exact"))
    ds_channel_config_path: str | None = flag(None, help=(
        "JSON file with the channels of each layer and head, the heaviest first, for --enable-double-sparsity; python "
        "-m baton.calibrate_double_sparsity writes one"))
    ds_heavy_channel_num: int = flag(32, help="channels of each key that give the approximate scores")
    ds_heavy_token_num: int = flag(256, help="tokens that each head of a request reads")
    ds_heavy_channel_type: Literal["qk", "k", "q"] = flag("qk", help=(
        "channels that are heavy in products of queries and keys, in keys, or in queries"))
    ds_sparse_decode_threshold: int = flag(4096, help="decode contexts of up to so many tokens exactly")

    own_flag_rules: ClassVar[tuple[Rule[SparsityArgs], ...]] = (
        Rule(lambda c: c.enable_double_sparsity and c.ds_channel_config_path is None,
             "--enable-double-sparsity needs --ds-channel-config-path FILE: python -m baton.calibrate_double_sparsity "
             "writes one."),
        Rule(lambda c: not c.enable_double_sparsity and any(
            getattr(c, field.name) != field.default for field in dataclasses.fields(c)),
             "--ds-channel-config-path and the other --ds- flags need --enable-double-sparsity."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.sparsity.enable_double_sparsity and c.model.is_embedding,
             "--enable-double-sparsity is for servers that generate: leave it out with --is-embedding."),
        Rule(lambda c: c.sparsity.enable_double_sparsity and c.model.model_impl == "transformers",
             "--enable-double-sparsity needs Baton's own layers: leave --model-impl transformers out."),
        Rule(lambda c: c.sparsity.enable_double_sparsity and c.kernels.enable_deterministic_inference,
             "--enable-double-sparsity chooses tokens by length and load, and --enable-deterministic-inference reads "
             "all: leave one of them out."),
        Rule(lambda c: c.sparsity.enable_double_sparsity and c.speculative.speculative_algorithm is not None,
             "--enable-double-sparsity is for decode steps of one row a request, and drafts are verified in several: "
             "leave it or --speculative-algorithm out."),
        Rule(lambda c: c.sparsity.enable_double_sparsity and c.kernels.decode_attention_backend == "flashinfer",
             "--enable-double-sparsity decodes by Baton's own kernels: leave --decode-attention-backend at auto."),
    )

    def __post_init__(self) -> None:
        at_least(self, 0, "ds_sparse_decode_threshold")
        at_least(self, 1, "ds_heavy_channel_num", "ds_heavy_token_num")
        check_own_rules(self)
