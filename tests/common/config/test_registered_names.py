"""Every implementation registers in its own file, and the registered names are those that ``--help`` shows."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from baton.common.api.errors import ConfigError
from baton.common.bench.eval_args import BenchEval
from baton.common.bench.exams.exam import EXAMS
from baton.common.bench.serving_args import BenchServing
from baton.common.bench.workloads.dataset_args import DATASETS
from baton.common.commands.registry import COMMANDS
from baton.common.config.cli import _flags
from baton.common.config.description import DESCRIPTIONS
from baton.common.config.load_format import LOAD_FORMATS
from baton.common.config.quantization import QUANTIZATIONS
from baton.common.config.roles import ROLES
from baton.common.config.server import ServerConfig
from baton.common.config.server.answers import GRAMMAR_BACKENDS
from baton.common.config.server.cache import EVICTION_POLICIES
from baton.common.config.server.disaggregation import TRANSFER_BACKENDS
from baton.common.config.server.kernels import ATTENTION_BACKENDS, LATENT_BACKENDS, SAMPLING_BACKENDS
from baton.common.config.server.schedule import SCHEDULE_POLICIES
from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS
from baton.common.config.server.tiers import KV_STORAGES, KV_TIERS, WRITE_POLICIES
from baton.common.models.registry import MODELS
from baton.common.parsers.reasoning import REASONING_FORMATS
from baton.common.parsers.tools import TOOL_FORMATS
from baton.common.registry import Registry
from baton.common.request.extras import EXTRAS
from baton.router.config import RouterConfig
from baton.router.config.policy import ROUTING_POLICIES
from baton.simulate.args import Simulate
from baton.simulate.workload.formats.base import TRACE_FORMATS
from baton.tests.helpers.layers import ROOT

FILES: dict[str, tuple[Registry, set[str]]] = {
    "common/attention": (ATTENTION_BACKENDS, {
        "base", "channel_recorder", "chunked_backend", "double_sparsity_backend", "fixed_tiles",
        "invariant_torch_backend", "hybrid_backend", "invariant_triton_backend", "select", "per_layer_backend",
        "prefill_decode_backend", "prompt_kernels", "whole_sequences", "workspace"}),
    "common/attention/mla": (LATENT_BACKENDS, {"base", "invariant_torch_backend", "select"}),
    "common/commands": (COMMANDS, {"base", "methods", "registry"}),
    "common/sampling": (SAMPLING_BACKENDS, {
        "builtin_processors", "chain_draft_sampling", "draft_sampler", "gumbel_noise", "loose_acceptance",
        "sampled_tokens", "sampler", "sampling_backend", "sglang_processors"}),
    "common/sampling/extras": (EXTRAS, set()),
    "common/speculative": (SPECULATIVE_ALGORITHMS, {
        "base", "draft_length", "draft_tree", "ngram_corpus", "ngram_index", "ngram_tree", "simulated", "verify"}),
    "common/grammar": (GRAMMAR_BACKENDS, {
        "backend", "ebnf", "fair_slots", "lark", "lark_tags", "masks", "matcher", "patterns", "service", "store",
        "trial", "xgrammar_compiler"}),
    "common/scheduler/policies": (SCHEDULE_POLICIES, {"order", "priority"}),
    "router/policies": (ROUTING_POLICIES, {
        "base", "load_view", "page_costs", "text_pages", "token_pages", "worker_groups"}),
    "common/parsers/tools": (TOOL_FORMATS, {
        "arguments_builder", "call_emitter", "format", "grammars", "json_array", "json_call", "registry", "values"}),
    "common/parsers/reasoning": (REASONING_FORMATS, {"format", "grammar", "parser", "registry"}),
    "common/bench/workloads": (DATASETS, {
        "arrivals", "dataset_args", "datasets", "own_workload", "vocabulary", "workload"}),
    "simulate/workload/formats": (TRACE_FORMATS, {"base"}),
    "common/bench/exams": (EXAMS, {"exam", "files", "numbers", "prompts"}),
    "common/quantization": (QUANTIZATIONS, {
        "bitsandbytes_linear", "bitsandbytes_tensors",
        "compressed_ints", "experts", "float8", "fp8_block", "fp8_per_channel", "gguf_linear", "int8_linear",
        "int_at_load",
        "methods", "mxfp4_experts", "mxfp4_packed", "packed_int_format", "packed_int_linear", "shards",
        "stored_ints"}),
    "common/config/described": (DESCRIPTIONS, set()),
    "common/models": (MODELS, {"registry"}),
    "common/weights": (LOAD_FORMATS, {
        "checksums", "custom_loaders", "digest", "expert_names", "files", "filling", "fingerprint", "fused_tensors",
        "interleaved_experts", "interleaved_rotary", "kv_scales", "lazy", "loader", "pickled", "plain_reads", "pushed",
        "removal", "samples", "shared_tensors", "slots", "source",
        "staging", "instance_transfer", "uploads"}),
    "common/kvcache/eviction": (EVICTION_POLICIES, {"base"}),
    "common/kvcache/write_policies": (WRITE_POLICIES, {"base"}),
    "common/kvcache/tiers": (KV_TIERS, {
        "base", "batch_copy", "evictable_keys", "page_copies", "shared_pages", "slot_memory", "with_states"}),
    "common/kvcache/storage": (KV_STORAGES, {
        "base", "fingerprint", "first_rank", "folder", "health", "objects", "open", "operations", "page_servers",
        "page_shape", "storage"}),
    "kvtransfer/pages": (KV_STORAGES, {"messages", "peers", "server", "staging"}),
    "kvtransfer/backends": (TRANSFER_BACKENDS, {"base", "cuda_driver", "ipc_cuda", "ipc_host"}),
}
"""By folder: the registry of its implementations, and the files that implement nothing."""
FLAGS = {
    "attention_backend": {"auto", *ATTENTION_BACKENDS, *LATENT_BACKENDS},
    "decode_attention_backend": {"auto", *ATTENTION_BACKENDS, *LATENT_BACKENDS},
    "quantization": {*QUANTIZATIONS},
    "load_format": {*LOAD_FORMATS},
    "sampling_backend": {"auto", *SAMPLING_BACKENDS},
    "grammar_backend": {"none", *GRAMMAR_BACKENDS},
    "tool_call_parser": {"auto", "none", *TOOL_FORMATS},
    "reasoning_parser": {"none", *REASONING_FORMATS},
    "dataset_name": {*DATASETS},
    "task": {*EXAMS},
    "trace_format": {*TRACE_FORMATS},
    "disaggregation_mode": {*ROLES},
    "schedule_policy": {*SCHEDULE_POLICIES},
    "speculative_algorithm": {*SPECULATIVE_ALGORITHMS},
    "speculative_draft_attention_backend": {"auto", *ATTENTION_BACKENDS, *LATENT_BACKENDS},
    "speculative_draft_model_quantization": {"unquant", *QUANTIZATIONS},
    "speculative_draft_load_format": {*LOAD_FORMATS},
    **dict.fromkeys(("policy", "prefill_policy", "decode_policy"), {*ROUTING_POLICIES}),
    "disaggregation_transfer_backend": {*TRANSFER_BACKENDS},
    "kv_tier": {*KV_TIERS},
    "hicache_write_policy": {*WRITE_POLICIES},
    "hicache_storage_backend": {*KV_STORAGES},
    "radix_eviction_policy": {*EVICTION_POLICIES},
}
"""Flags that take registered names, and the values that ``--help`` shows."""


COMMANDS = (RouterConfig, ServerConfig, BenchServing, BenchEval, Simulate)


@pytest.mark.parametrize("folder", FILES)
def test_every_implementation_registers_in_its_own_file(folder):
    registry, others = FILES[folder]
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    package = "baton." + folder.replace("/", ".")
    modules = {module for name in registry.all_names if (module := registry.module_of(name) or "").startswith(package)}
    assert {module.rpartition(".")[2] for module in modules} == files - others
    assert others <= files
    assert package in registry.packages


@pytest.mark.parametrize("folder", FILES)
def test_every_name_leads_to_an_entry(folder):
    """Also where the library that it needs is not installed."""
    registry, _ = FILES[folder]
    for name in registry.all_names:
        assert registry.get(name) is not None
    with pytest.raises(ConfigError, match=registry.names[0]):
        registry.get("no such name")


@pytest.mark.parametrize("name", FLAGS)
def test_registered_names_are_those_of_the_flag(name):
    flags = {flag.key: flag for config in COMMANDS for flag in _flags(config)}
    assert set(flags[name].choices or ()) == FLAGS[name]


def test_flags_that_take_registered_names_are_all_listed():
    flags = [flag for config in COMMANDS for flag in _flags(config)]
    assert {flag.key for flag in flags if flag.field.metadata["choices"] is not None} == FLAGS.keys()


def test_the_fake_transfer_backend_is_taken_but_not_shown():
    assert "fake" in TRANSFER_BACKENDS and "fake" not in TRANSFER_BACKENDS.names
    (flag,) = [flag for flag in _flags(ServerConfig) if flag.key == "disaggregation_transfer_backend"]
    assert flag.convert("fake") == "fake"
    with pytest.raises(ConfigError, match="must be one of auto, ipc, mooncake, nixl, not 'pigeon'"):
        flag.convert("pigeon")


def test_an_implementation_of_a_new_file_is_known(tmp_path, monkeypatch):
    """One file with one decorator is all that a backend takes."""
    source = ("from ..config.server.kernels import SAMPLING_BACKENDS\n\n\n"
              "@SAMPLING_BACKENDS.register('toy')\ndef make(vocab_size, device, seed):\n    return vocab_size\n")
    (tmp_path / "toy_sampling.py").write_text(source)
    package = importlib.import_module("baton.common.sampling")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", package.__path__)
    for cache in ("_declared", "_entries"):
        monkeypatch.setitem(vars(SAMPLING_BACKENDS), cache, dict(vars(SAMPLING_BACKENDS).get(cache, {})))
    monkeypatch.delitem(vars(SAMPLING_BACKENDS), "_declared")
    (flag,) = [flag for flag in _flags(ServerConfig) if flag.key == "sampling_backend"]
    assert "toy" in (flag.choices or ())
    assert SAMPLING_BACKENDS.get("toy")(7, None, 0) == 7  # type: ignore[arg-type]
    assert Path(importlib.import_module(SAMPLING_BACKENDS.module_of("toy") or "").__file__ or "").parent == tmp_path
