"""Flags of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules

EVICTION_POLICIES: Registry[Callable[..., Any]] = Registry("eviction policy", "baton.common.kvcache.eviction")
"""Classes of ``EvictionOrder`` (kvcache/eviction/base.py), whose parameters are the settings of
--radix-eviction-policy-config."""

KVCacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]


@dataclass(frozen=True)
class CacheArgs:
    page_size: int = flag(16, help="tokens in a KV page")
    mem_fraction_static: float = flag(0.88, help="share of GPU memory for weights and KV pool together")
    max_total_tokens: int | None = flag(None, help="KV pool size in tokens; the default is what memory allows")
    disable_radix_cache: bool = flag(False, help="keep no prefix cache: free the pages of finished requests")
    radix_eviction_policy: str = flag("lru", choices=Choices.of(EVICTION_POLICIES), help=(
        "pages that leave the prefix cache and the host tier first: those least recently used (lru), least often used "
        "(lfu), used once (slru), of the least urgent requests (priority), or at the ends of conversations, as far as "
        "these are computed again soon enough (tlru)"))
    radix_eviction_policy_config: str = flag("{}", metavar="JSON", help=(
        'settings of the eviction policy: {"protected_threshold": USES} of slru, {"threshold": TOKENS, '
        '"next_prompt_estimate": TOKENS} of tlru'))
    swa_full_tokens_ratio: float = flag(0.8, help=(
        "tokens in the KV pool of layers with a sliding window, as a share of those in the pool of the other layers"))
    disable_hybrid_swa_memory: bool = flag(False, help=(
        "keep the KV of layers with a sliding window as long as that of the other layers, in one pool"))
    max_mamba_cache_size: int | None = flag(None, help=(
        "states of a hybrid model's recurrent layers (Mamba-2, gated delta networks) in a rank's memory: those of "
        "running requests, two or three each, and those in the prefix cache; by default --mamba-full-memory-ratio says "
        "it"))
    mamba_full_memory_ratio: float = flag(0.9, help=(
        "memory for the states of a hybrid model, as a share of that for the KV pool of its attention layers"))
    mamba_ssm_dtype: Literal["float32", "bfloat16"] = flag("float32", help=(
        "type in which the states of a hybrid model's recurrent layers are kept"))
    num_layer_groups: int | None = flag(None, help=(
        "layer groups of the KV pool; by default as many as make a page of one about 1 MiB"))
    kv_cache_dtype: KVCacheDtype = flag("auto", help=(
        "type of the KV cache; auto is the model's, float8 takes half the memory and half the transfer"))
    quantization_param_path: str | None = flag(None, help=(
        "JSON file with the scales of a KV cache in float8 ({\"kv_cache\": {\"scaling_factor\": {RANK: {LAYER: "
        "FACTOR}}}}); without it they are the checkpoint's, or 1"))

    own_flag_rules: ClassVar[tuple[Rule[CacheArgs], ...]] = (
        Rule(lambda c: c.quantization_param_path is not None and c.kv_cache_dtype == "auto",
             "--quantization-param-path is for a KV cache in float8: set --kv-cache-dtype too."),
        Rule(lambda c: c.radix_eviction_policy != "lru" and c.disable_radix_cache,
             "--radix-eviction-policy orders the pages of the prefix cache; drop --disable-radix-cache, or leave it "
             "out."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.cache.radix_eviction_policy == "priority" and not c.schedule.enable_priority_scheduling,
             "--radix-eviction-policy priority needs --enable-priority-scheduling."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "page_size", "num_layer_groups", "max_mamba_cache_size")
        if self.mamba_full_memory_ratio <= 0:
            raise ConfigError(f"--mamba-full-memory-ratio {self.mamba_full_memory_ratio:g} must be above 0.")
        if not 0 < self.mem_fraction_static < 1:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, not {self.mem_fraction_static}.")
        if not 0 < self.swa_full_tokens_ratio <= 1:
            raise ConfigError(f"--swa-full-tokens-ratio {self.swa_full_tokens_ratio:g} must be above 0 and at most 1.")
        check_own_rules(self)
