"""Dumps of --debug-tensor-dump-output-folder as tests read them, and what transformers' modules compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

INFO = "model.forward_batch_info."
HEADS = ("model.norm", "lm_head", "logits_processor")
"""Modules of the rows that get logits."""


def passes_of(folder: Path) -> list[dict[str, Any]]:
    """The files of one rank's folder, in order."""
    files = sorted(folder.glob("Pass*.pt"))
    assert [file.name for file in files] == [f"Pass{number:05d}.pt" for number in range(len(files))]
    return [torch.load(file) for file in files]


def by_position(passes: Sequence[dict[str, Any]], name: str) -> dict[int, torch.Tensor]:
    """The rows that a module computed of one request alone, by their positions."""
    found = {}
    for tensors in passes:
        positions = tensors[INFO + "positions"].tolist()
        rows = tensors[name]
        assert len(rows) in (len(positions), 1), name
        found.update(zip(positions[len(positions) - len(rows):], rows))
    return found


@torch.inference_mode()
def module_outputs(model: Any, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """What modules of a model of transformers compute of one sequence ``[T, ...]``, by their names."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, torch.Tensor):
                outputs[name] = output.reshape(-1, output.shape[-1]).clone()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return outputs
