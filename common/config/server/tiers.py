"""Flags of the KV tiers: host memory behind the GPU's pool, and storage behind that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule, check_own_rules, json_object

KV_TIERS: Registry[Callable[[Any], Any]] = Registry("KV tier", "baton.common.kvcache.tiers", group="baton.kv_tiers")
"""Functions that make a ``KVTier`` from a ``TierContext``; both types are in kvcache/tiers/base.py."""

KV_STORAGES: Registry[Callable[..., Any]] = Registry("KV storage backend", "baton.common.kvcache.storage",
                                                     "baton.kvtransfer.pages", group="baton.kv_storages")
"""Functions that make a ``StorageBackend``; see kvcache/storage/base.py. Traits: "reads_only", it keeps nothing that it
is given; "in_memory", it answers at the speed of the network."""

WRITE_POLICIES: Registry[Callable[[], Any]] = Registry("write policy", "baton.common.kvcache.write_policies")
"""Functions that make a ``WritePolicy``; see kvcache/write_policies/base.py."""

_IN_MEMORY_THRESHOLD = 16
"""Tokens that are worth a request to a storage that answers at the speed of the network."""

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
LoadPolicy = Literal["cheaper", "always"]


@dataclass(frozen=True)
class PrefetchLimits:
    """What ``--hicache-storage-backend-extra-config`` says about prefetches; SGLang's names and defaults."""

    prefetch_threshold: int = 256
    """Fewest tokens that are worth a request to the storage; 16 where it is other servers' memory."""
    prefetch_timeout_base: float = 2.0
    """Seconds that a prefetch may take with --hicache-storage-prefetch-policy timeout, however few tokens it has."""
    prefetch_timeout_per_ki_token: float = 0.1
    """Seconds for each 1,024 tokens on top of that."""
    prefetch_timeout_max: float = 30.0
    """Seconds that no prefetch exceeds."""

    def timeout(self, num_tokens: int) -> float:
        """Seconds that a prefetch of ``num_tokens`` may take."""
        return min(self.prefetch_timeout_max,
                   self.prefetch_timeout_base + self.prefetch_timeout_per_ki_token * num_tokens / 1024)


@dataclass(frozen=True)
class TierArgs:
    enable_hierarchical_cache: bool = flag(False, help=(
        "keep pages of the prefix cache in host memory, too, and in a storage behind it; later prompts load what is "
        "cheaper to load than to compute"))
    hicache_ratio: float = flag(2.0, help="host memory for pages, as a multiple of each rank's KV pool")
    hicache_size: float = flag(0.0, help="host memory for pages, in GB for each rank; 0: as --hicache-ratio says")
    hicache_write_policy: str = flag("write_through", choices=Choices.of(WRITE_POLICIES), help=(
        "when pages are copied to host memory. write_through: once computed; write_through_selective: when a second "
        "prompt uses them; write_back: when evicted"))
    hicache_io_backend: Literal["kernel", "direct"] = flag("direct", help=(
        "copies between GPU and host memory. direct: the copy engine; kernel: one kernel gathers all pages, which "
        "slows the steps beside it"))
    hicache_load_policy: LoadPolicy = flag("cheaper", help=(
        "which pages of the tiers are loaded. cheaper: those that would take longer to compute, by measured rates; "
        "always: all, to measure the tiers or to spare the GPU"))
    hicache_storage_backend: str | None = flag(None, choices=Choices.of(KV_STORAGES), help=(
        "storage that pages in host memory are written to, and prompts' pages are prefetched from"))
    hicache_storage_prefetch_policy: PrefetchPolicy = flag("timeout", help=(
        "when a prompt stops to wait for its prefetch. best_effort: once it could be computed; wait_complete: when all "
        "pages are there; timeout: that, within a time by its length"))
    hicache_storage_backend_extra_config: str | None = flag(None, help=(
        "JSON object with settings of the storage backend, or @FILE with one; prefetch_threshold (tokens), "
        "prefetch_timeout_base and prefetch_timeout_per_ki_token (seconds) are the same for all backends"))
    kv_tier: str = flag("host", choices=Choices.of(KV_TIERS), help=(
        "what --enable-hierarchical-cache keeps pages in: host memory, or a tier of your own"))

    own_flag_rules: ClassVar[tuple[Rule[TierArgs], ...]] = (
        Rule(lambda c: c.hicache_storage_backend is not None and not c.enable_hierarchical_cache,
             "--hicache-storage-backend is behind the host memory of --enable-hierarchical-cache: set that, too."),
        Rule(lambda c: c.kv_tier != "host" and not c.enable_hierarchical_cache,
             "--kv-tier {kv_tier} needs --enable-hierarchical-cache."),
        Rule(lambda c: c.kv_tier != "host" and c.hicache_storage_backend is not None,
             "--hicache-storage-backend fills host memory: leave --kv-tier at host."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.tiers.enable_hierarchical_cache and c.cache.disable_radix_cache,
             "--enable-hierarchical-cache keeps pages of the prefix cache; drop --disable-radix-cache, or leave it "
             "out."),
        Rule(lambda c: c.parallel.pp_size > 1 and c.tiers.hicache_storage_backend is not None,
             "--hicache-storage-backend stores pages of all layers, and the stages of --pp-size have a share of them: "
             "leave one of them out."),
        Rule(lambda c: c.parallel.pp_size > 1 and c.tiers.enable_hierarchical_cache and c.tiers.hicache_size > 0,
             "--hicache-size is of a rank, and the stages of --pp-size need memory for the same pages: use "
             "--hicache-ratio."),
    )

    def __post_init__(self) -> None:
        if not self.hicache_ratio > 0:
            raise ConfigError(f"--hicache-ratio must be above 0, not {self.hicache_ratio:g}.")
        if not self.hicache_size >= 0:
            raise ConfigError(f"--hicache-size must be 0 or more, not {self.hicache_size:g}.")
        _ = self.prefetch_limits
        check_own_rules(self)

    def host_bytes(self, pool_bytes: int) -> int:
        """Host memory for the pages of a pool of ``pool_bytes``."""
        return int(self.hicache_size * 1e9) or int(self.hicache_ratio * pool_bytes)

    @property
    def host_flag(self) -> str:
        """The flag that sets the size of host memory."""
        return "--hicache-size" if self.hicache_size else "--hicache-ratio"

    @functools.cached_property
    def extra_config(self) -> dict[str, Any]:
        """``--hicache-storage-backend-extra-config``, read from its file where it names one. Raises ConfigError."""
        name, text = "--hicache-storage-backend-extra-config", self.hicache_storage_backend_extra_config
        if text is None:
            return {}
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text()
            except OSError as error:
                raise ConfigError(f"{name} {text} cannot be read: {error.strerror}.") from None
        return json_object(name, text)

    @functools.cached_property
    def prefetch_limits(self) -> PrefetchLimits:
        """Raises ConfigError where the extra configuration has other values than numbers for them."""
        found: dict[str, Any] = {}
        if self.hicache_storage_backend and KV_STORAGES.has(self.hicache_storage_backend, "in_memory"):
            found["prefetch_threshold"] = _IN_MEMORY_THRESHOLD
        for name in PrefetchLimits.__dataclass_fields__:
            if name in self.extra_config:
                value = self.extra_config[name]
                if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                    raise ConfigError(f"{name} of --hicache-storage-backend-extra-config must be a number of 0 or "
                                      f"more, not {value!r}.")
                found[name] = value
        return PrefetchLimits(**found)

    @property
    def storage_config(self) -> dict[str, Any]:
        """The settings that are the backend's own."""
        return {name: value for name, value in self.extra_config.items()
                if name not in PrefetchLimits.__dataclass_fields__}
