"""What tests of several models on a GPU ask of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.common.config.server import KernelArgs
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, scattered_pages, server_config


def check_graphs_and_overlap(folder: Path, device: str = "cuda", **fixed: Any) -> None:
    """Neither changes a token of what torch's attention answers without them. ``fixed``: options of all engines."""
    prompts = [[(7 * i + count) % 97 for i in range(count)] for count in (3, 20, 41, 8, 17)]

    def answers(**options: Any) -> list[list[int]]:
        engine = Engine(folder, page_size=16, device=device, **fixed, **options)
        for rid, prompt in enumerate(prompts):
            engine.start(str(rid), prompt, max_new_tokens=24)
        found = tokens_of(engine.run())
        return [found[str(rid)] for rid in range(len(prompts))]

    plain = answers(kernels=KernelArgs(attention_backend="torch", disable_cuda_graph=True))
    assert answers(kernels=KernelArgs(disable_cuda_graph=True)) == plain
    assert answers(kernels=KernelArgs(), overlap=True) == plain


def check_bfloat16(model: Any, folder: Path, backend: str, device: str = "cuda:0", **options: Any) -> None:
    """Against float32: our bfloat16 error is at most that of transformers' ``model``, which is saved in ``folder``, in
    bfloat16, give or take a half. ``options`` are of ModelArgs."""
    tokens = np.random.default_rng(0).integers(0, 97, 100)
    exact = expected_logits(model, tokens)
    model = model.to(device, torch.bfloat16)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(tokens)[None].to(device)).logits[0].float().cpu()
    runner = load_runner(server_config(folder, backend=backend, dtype="bfloat16", **options), device=device)
    pages = scattered_pages(runner, 1, 100)[0]
    ours = torch.cat([forward(runner, [(tokens[:61], 0, pages)]), forward(runner, [(tokens[61:99], 61, pages)]),
                      forward(runner, [(tokens[99:], 99, pages)])]).cpu()
    assert (ours - exact).square().mean().sqrt() <= 1.5 * (theirs - exact).square().mean().sqrt()
