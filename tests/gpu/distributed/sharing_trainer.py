"""A trainer that shares tensors on a GPU with test_shared_tensors.py's process."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

import baton


def tensors_of(seed: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors that are parts of one allocation, one that fills an allocation exactly, and one in host memory."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"small {index}": torch.randn(5 + index, 3, generator=generator) for index in range(4)}
    made["large"] = torch.randn(4096, 4096, generator=generator).to(torch.bfloat16)  # 32 MiB
    on_device = {name: tensor.to(device) for name, tensor in made.items()}
    return on_device | {"host": torch.randn(7, generator=generator)}


def main(device: int, pipe: Connection) -> None:
    """Shares tensors of each seed that it gets, in the same memory, until it gets None."""
    torch.cuda.set_device(device)
    tensors: dict[str, torch.Tensor] = {}
    while (seed := pipe.recv()) is not None:
        for name, tensor in tensors_of(seed, "cuda").items():
            if name in tensors:
                tensors[name].copy_(tensor)
            else:
                tensors[name] = tensor
        shared = baton.share_tensors(tensors)
        pipe.send(shared.entry)
