"""What the recurrent layers of hybrid models do not combine with."""

from __future__ import annotations

from .model import ModelSpec
from .rules import ServerRule
from .server import ServerConfig

HYBRID_RULES: tuple[ServerRule, ...] = (
    ServerRule(lambda c: c.speculative.drafts_trees,
               "The recurrent layers of this model verify chains of drafts, no trees: leave --speculative-eagle-topk "
               "and --speculative-ngram-max-bfs-breadth at 1."),
    ServerRule(lambda c: c.speculative.speculative_adaptive,
               "--speculative-adaptive does not measure what drafts cost the recurrent layers of this model: leave it "
               "out."),
    ServerRule(lambda c: c.parallel.pp_size > 1,
               "The states of this model's recurrent layers are not split over pipeline stages: use --tp-size instead "
               "of --pp-size."),
    ServerRule(lambda c: c.data_parallel.enable_two_batch_overlap,
               "--enable-two-batch-overlap cuts steps within a request, whose recurrent layers compute its rows one "
               "after the other: leave it out."),
    ServerRule(lambda c: c.tiers.enable_hierarchical_cache and c.role.receives_kv,
               "--enable-hierarchical-cache does not keep the states of this model's recurrent layers on a decode "
               "server: leave it out."),
    ServerRule(lambda c: c.tiers.enable_hierarchical_cache and (
        c.tiers.kv_tier != "host" or c.tiers.hicache_storage_backend is not None),
        "The states of this model's recurrent layers are kept in host memory alone: leave --kv-tier at host, and "
        "--hicache-storage-backend out."),
    ServerRule(lambda c: c.schedule.retract_host_memory_gb,
               "--retract-host-memory-gb does not keep the states of this model's recurrent layers: leave it out."),
    ServerRule(lambda c: c.sparsity.enable_double_sparsity,
               "--enable-double-sparsity is for models whose layers all have keys and values: leave it out."),
    ServerRule(lambda c: c.model.is_embedding,
               "Models with recurrent layers are served for generation alone: leave --is-embedding out."),
    ServerRule(lambda c: c.kernels.enable_deterministic_inference,
               "The recurrent layers of this model add in an order that depends on where chunks end: leave "
               "--enable-deterministic-inference out."),
)
"""On the configuration of a server whose model has a StateSpec."""


def check_hybrid(config: ServerConfig, spec: ModelSpec) -> None:
    """Raises ConfigError where the configuration does not fit a model with recurrent layers."""
    for rule in HYBRID_RULES if spec.state is not None else ():
        rule.check(config)
