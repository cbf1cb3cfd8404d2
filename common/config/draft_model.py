"""The flags and the config.json of a draft model, as of a model of its own. It imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..api.errors import ConfigError
from .checkpoint import pin_revision
from .server import ModelArgs, ServerConfig

_OWN_NAMES = {"--model-path": "--speculative-draft-model-path", "--load-format": "--speculative-draft-load-format",
              "--quantization": "--speculative-draft-model-quantization",
              "--(?:decode-)?attention-backend": "--speculative-draft-attention-backend"}
"""Flags of the draft model, by patterns of the model's."""


def draft_args(config: ServerConfig) -> ModelArgs:
    """Returns the flags of the draft model that --speculative-draft-model-path names, as a model's."""
    args = config.speculative
    assert args.speculative_draft_model_path is not None
    default = "dummy" if config.model.load_format == "dummy" else "auto"
    return replace(
        config.model, model_path=args.speculative_draft_model_path, revision=args.speculative_draft_model_revision,
        tokenizer_path=None, model_fingerprint=None, served_model_name=None, quantization=args.draft_quantization,
        model_impl="baton", context_length=None, json_model_override_args="{}",
        load_format=args.speculative_draft_load_format or default)


def pin_revisions(config: ServerConfig) -> ServerConfig:
    """Sets the revisions of the model and of the draft model to the hub's commits, so that all processes load the same
    ones. Raises ConfigError."""
    config = replace(config, model=pin_revision(config.model))
    if config.speculative.speculative_draft_model_path is None:
        return config
    with naming_draft():
        revision = pin_revision(draft_args(config)).revision
    return replace(config, speculative=replace(config.speculative, speculative_draft_model_revision=revision))


def flat_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a draft model's config.json as those of the layer that it has: heads of vLLM's speculators
    library have these in ``transformer_layer_config``. Raises ConfigError for heads other than EAGLE-3's."""
    layer = values.get("transformer_layer_config")
    if layer is None:
        return dict(values)
    named = " ".join(values.get("architectures") or ())
    kind = values.get("speculators_model_type") or ("eagle3" if named.startswith("Eagle3") else named or "unknown")
    if kind != "eagle3" or not isinstance(layer, Mapping):
        raise ConfigError(f"The draft model is a speculator of the kind {kind}: --speculative-algorithm EAGLE3 reads "
                          "those of the kind eagle3.")
    return {"norm_before_residual": True, **layer, **values, "architectures": ["LlamaForCausalLM"]}


@contextmanager
def naming_draft() -> Iterator[None]:
    """Names the draft model's flags in errors of its checkpoint."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for name, own in _OWN_NAMES.items():
            text = re.sub(rf"{name}\b", own, text)
        raise ConfigError(text) from None
