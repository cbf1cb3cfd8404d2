"""The input of ``--debug-tensor-dump-input-file``: token ids, or a dumped step whose tensors are put into this model's
layers and compared with what they compute."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..models.decoder.module_calls import ModuleCall

log = logging.getLogger("baton.dump")

INFO = "model.forward_batch_info."
_FLAG = "--debug-tensor-dump-input-file"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)")
_INPUT_NORM = re.compile(r"(.*\blayers\.)(\d+)\.input_layernorm")
_OF_RANK = re.compile(r".*\.self_attn\.(qkv_proj|attn)")
_SHOWN = 5


class TensorInput(NamedTuple):
    """Prompts, and of a dumped step the outputs of modules by their names."""

    prompts: list[np.ndarray]
    tensors: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Difference(NamedTuple):
    """How far a module's output is from the file's."""

    name: str
    largest: float
    scale: float
    """The largest absolute value in the file."""

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale else self.largest


def read_input(path: str, spec: ModelSpec) -> TensorInput:
    """Reads a ``.npy`` file of token ids ([T], or [prompts, T]), or a step's ``.pt`` file of
    --debug-tensor-dump-output-folder. Raises ConfigError where it is neither, or not for this model."""
    try:
        if path.endswith(".npy"):
            ids = np.load(Path(path).expanduser(), allow_pickle=False)
            found = TensorInput(list(np.atleast_2d(ids)), {})
        else:
            found = _of_dump(torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True))
    except OSError as error:
        raise ConfigError(f"Cannot read {_FLAG} {path}: {error.strerror}.") from None
    except ConfigError:
        raise
    except Exception as error:  # numpy's and torch's own errors of files that are something else
        raise ConfigError(f"Cannot read {_FLAG} {path}: {type(error).__name__}. It must be a .npy file of token ids "
                          "or a .pt file of a dump.") from None
    for prompt in found.prompts:
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
            raise ConfigError(f"{_FLAG} {path} must have one token id or more for each prompt.")
        if prompt.min() < 0 or prompt.max() >= spec.vocab_size:
            raise ConfigError(f"{_FLAG} {path} has token ids beyond the model's {spec.vocab_size}.")
        if len(prompt) > spec.context_length:
            raise ConfigError(f"{_FLAG} {path} has a prompt of {len(prompt)} tokens, beyond --context-length "
                              f"{spec.context_length}.")
    return found


def _of_dump(tensors: Mapping[str, Any]) -> TensorInput:
    ids, positions = (tensors[INFO + name].numpy() for name in ("input_ids", "positions"))
    lens = tensors.get(INFO + "extend_seq_lens")
    ends = np.cumsum([len(ids)] if lens is None else lens.tolist())
    prompts, starts = np.split(ids, ends[:-1]), np.split(positions, ends[:-1])
    if any(not np.array_equal(start, np.arange(len(start))) for start in starts):
        raise ConfigError(f"{_FLAG} has a step that follows others: give that of whole prompts, which "
                          "--disable-radix-cache and a larger --chunked-prefill-size let a server dump.")
    return TensorInput(prompts, tensors)


def injected(call: ModuleCall, tensors: Mapping[str, Any], args: tuple[Any, ...],
             options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of ``call``, those of a layer's first module with the file's hidden states before it."""
    fused = call.method != "forward"
    layer = (_INPUT_NORM if fused else _LAYER).fullmatch(call.names[0])
    if layer is None:
        return args, options
    before = int(layer[2]) - 1
    name = f"{layer[1]}{before}" if before >= 0 else layer[1].removesuffix("layers.") + "embed_tokens"
    value = tensors.get(name)
    if isinstance(value, Sequence) and value:  # of SGLang: the MLP's result and the residual
        value = value[0] + value[1] if len(value) > 1 else value[0]
    if not isinstance(value, torch.Tensor):
        return args, options
    if fused:
        format_of, x, _, *rest = args
        known = x if isinstance(x, torch.Tensor) else x.reduce()
        return (format_of, _like(value, known, name), None, *rest), options
    if args:
        return (_like(value, args[0], name), *args[1:]), options
    return args, options | {"hidden_states": _like(value, options["hidden_states"], name)}


def _like(value: torch.Tensor, known: torch.Tensor, name: str) -> torch.Tensor:
    if value.numel() != known.numel():
        raise ConfigError(f"{_FLAG} has {name} of shape {list(value.shape)}, and the model's is {list(known.shape)}.")
    return value.to(known.device, known.dtype).view(known.shape).clone()


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], *, of_rank: bool) -> list[Difference]:
    """Compares the modules that both have, in equal shapes; ``of_rank``: also those whose outputs are a rank's own."""
    result = []
    for name, value in found.items():
        other = expected.get(name)
        if name.startswith(INFO) or not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or (
                value.shape != other.shape or (not of_rank and _OF_RANK.fullmatch(name))):
            continue
        value, other = value.float(), other.float()
        result.append(Difference(name, float((value - other).abs().max()), float(other.abs().max())))
    return result


def log_differences(found: Sequence[Difference]) -> None:
    """Logs how far modules are from the file, the farthest ones by name."""
    if not found:
        log.warning("%s has no tensor that this model's modules compute: nothing was compared", _FLAG)
        return
    farthest = sorted(found, key=lambda each: each.relative, reverse=True)[:_SHOWN]
    log.info("compared %d modules with %s; the farthest: %s", len(found), _FLAG, ", ".join(
        f"{each.name} by {each.largest:.2e} of {each.scale:.2e}" for each in farthest))
