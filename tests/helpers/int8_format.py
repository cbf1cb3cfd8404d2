"""The toy format tests/common/quantization/toyint8.py: registered for a while, and checkpoints in it."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from baton.common.config.quantization import QUANTIZATIONS


@contextlib.contextmanager
def registered() -> Iterator[Any]:
    """Registers the format, which importing its module alone does the first time only; yields the module."""
    module = importlib.import_module("baton.tests.common.quantization.toyint8")
    QUANTIZATIONS.register("toyint8")(module.ToyInt8)
    try:
        yield module
    finally:
        del QUANTIZATIONS._entries["toyint8"]


def quantize_checkpoint(folder: Path, toy: Any) -> None:
    """Quantizes the checkpoint in ``folder``."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale"] = toy.quantize(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "toyint8"}}))
