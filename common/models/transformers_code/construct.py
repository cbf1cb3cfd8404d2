"""Makes a model of transformers without memory for its weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...api.errors import ConfigError
from ..transformers_impl import TransformersSpec

_PATCHES = threading.Lock()
"""Held while classes are patched, which are every thread's."""

log = logging.getLogger("baton.engine")


def make_model(architecture: str, own: TransformersSpec, attention: str, dtype: torch.dtype,
               device: torch.device) -> Any:
    """Makes the model ``architecture``, with parameters on the meta device and buffers on ``device``, whose attention
    is the registered function ``attention``. Raises ConfigError for one that transformers does not have, or whose
    attention cannot be replaced."""
    options = {key: value for key, value in own.config.items() if key != "model_type"}
    code = own.code
    kind: Any
    if code is not None:
        made: Any = get_class_from_dynamic_module(code.config_class, code.source, revision=code.revision)(**options)
        kind = get_class_from_dynamic_module(code.model_class, code.source, revision=code.revision)
    else:
        kind = getattr(transformers, architecture, None)
        made = transformers.AutoConfig.for_model(own.config["model_type"], **options) if kind is not None else None
    if kind is None or not getattr(kind, "_supports_attention_backend", False) or getattr(kind, "_is_stateful", False):
        where = "the checkpoint's code" if code else f"transformers {transformers.__version__}"
        raise ConfigError(f"--model-impl transformers cannot serve {architecture}: {where} has no such model whose "
                          "attention can be replaced.")
    with _PATCHES:
        with torch.device(device), no_init_weights(), _parameters_on_meta():
            model = kind._from_config(made, dtype=dtype, attn_implementation=attention)
        model.tie_weights()
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves each parameter to the meta device when a module registers it: never more than one is in memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def fix_rotary_length(model: nn.Module, context_length: int) -> None:
    """Fixes the rotary embeddings that transformers changes with the longest sequence of a batch (dynamic NTK,
    longrope) to those of a sequence of ``context_length``: a key in the cache is rotated once."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        kind = getattr(module, "rope_type", None)
        if kind not in ("dynamic", "longrope"):
            continue
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=context_length)
        module.register_buffer("inv_freq", frequencies.to(module.inv_freq), persistent=False)
        module.attention_scaling = scaling
        module.rope_type = "default"
        log.info("rotary embeddings of type %s are those of sequences of %d tokens, whatever a request's length", kind,
                 context_length)
