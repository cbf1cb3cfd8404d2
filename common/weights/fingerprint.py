"""A checkpoint's fingerprint: equal for copies of it, however they are split into files, different for other weights.

It covers what config.json says of the computation, and the identity of the weights: of a checkpoint in safetensors all
tensors' names, types and shapes, and samples of their content: three samples of 1 KiB of up to 2,048 tensors, among
them every kind of tensor of a layer. So it describes the whole model on every rank, however it is sharded, and costs
the same for 1 GB and for 234: 0.8 s for 30,720 tensors in 40 files, most of it for their headers. It cannot detect
weights that differ in a few rows only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import partial

from ..api.identity import ModelIdentity
from ..config.load_format import LOAD_FORMATS
from ..config.model import ModelSpec
from ..config.server import ModelArgs
from .kv_scales import is_kv_scale

_SERVER_FIELDS = ("dtype", "eos_token_ids", "context_length", "quantization")
"""Fields of ModelSpec that describe how a server runs a model, or its API; a checkpoint in float8 differs by its
tensors."""
_STATED_OF_ALL = {"attention_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
"""Facts that are part of every model's fingerprint, also where its family does not have them."""


def identify(args: ModelArgs, spec: ModelSpec, updates: int = 0) -> ModelIdentity:
    """Computes the identity of the weights that ``args`` name; raises ConfigError for files that cannot be read."""
    source = args.model_path if args.revision is None else f"{args.model_path}@{args.revision}"
    if args.model_fingerprint is not None:
        return ModelIdentity(args.model_fingerprint, source, updates)
    load_format = LOAD_FORMATS.get(args.load_format)
    weights = load_format(args)
    if not load_format.reads_checkpoint:
        source = f"{source} with {weights.name}"
    digest = hashlib.sha256(_facts(spec))
    digest.update(weights.identity(partial(_is_optional, spec)))
    return ModelIdentity(digest.hexdigest()[:16], source, updates)


def identify_draft(args: ModelArgs) -> ModelIdentity:
    """Computes the identity of a draft model's weights, by all tensors of the checkpoint that ``args`` names: its own,
    or the model's, which has its layers. Raises ConfigError for files that cannot be read."""
    source = args.model_path if args.revision is None else f"{args.model_path}@{args.revision}"
    weights = LOAD_FORMATS.get(args.load_format)(args)
    digest = hashlib.sha256(weights.identity(lambda name: name.endswith("rotary_emb.inv_freq") or is_kv_scale(name)))
    return ModelIdentity(digest.hexdigest()[:16], source)


def _facts(spec: ModelSpec) -> bytes:
    """Encodes the fields that differ from their defaults: a release with more fields gets the same for older models."""
    facts = {**_STATED_OF_ALL, **spec.facts()}
    for name in _SERVER_FIELDS:
        facts.pop(name, None)
    return json.dumps(facts, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)
                if getattr(value, field.name) != field.default}
    return repr(value)


def _is_optional(spec: ModelSpec, name: str) -> bool:
    """Returns whether some copies of a model lack the tensor. A KV cache's scales are compared with its layout."""
    return (name.endswith("rotary_emb.inv_freq") or is_kv_scale(name) or name.startswith(spec.unused_names)
            or (spec.tie_word_embeddings and name == "lm_head.weight"))
