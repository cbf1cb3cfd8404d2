"""Small random models, saved by transformers, and runners over them; shared by the tests of the engine core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from baton.common.config.cli import build
from baton.common.config.server import ServerConfig
from baton.common.distributed.parallel import Parallel
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.models.registry import load_model_spec
from baton.common.runner.model_runner import ModelRunner

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
BASE = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 7}


def save_model(folder: Path, family: str, shard: str = "50GB", **changes: Any) -> Any:
    """A transformers model with random weights, norms and biases included, saved to ``folder``."""
    torch.manual_seed(0)
    extra = {"sliding_window": None} if family == "Mistral" else {"head_dim": 16} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**{**BASE, **extra, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def save_steep_qwen3(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Saves a Qwen3 whose random weights are large, so that its answers differ and hardly ever depend on a tie."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": None}
    config = transformers.Qwen3Config(**{**sizes, "initializer_range": 0.3, **changes})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def server_config(folder: Path | str, *, page_size: int = 16, backend: str = "torch", tp: int = 1,
                  max_total_tokens: int | None = 2048, num_layer_groups: int | None = None,
                  **model: Any) -> ServerConfig:
    return build(ServerConfig, {
        "model_path": str(folder), "page_size": page_size, "max_total_tokens": max_total_tokens,
        "num_layer_groups": num_layer_groups, "swa_full_tokens_ratio": 1.0, "tp_size": tp,
        "max_mamba_cache_size": (max_total_tokens or 2048) // page_size + 1,
        "attention_backend": backend, **model})


def load_runner(config: ServerConfig, parallel: Parallel | None = None, device: str = "cpu") -> ModelRunner:
    return ModelRunner.load(config, load_model_spec(config.model), parallel or Parallel(), device,
                            lambda what, fraction: None)


def row_of(runner: ModelRunner, tokens: np.ndarray, start: int, page_ids: np.ndarray) -> Row:
    """A row with equal page ids in all cache groups."""
    return Row(tokens, start, page_ids, further=[page_ids] * len(runner.pools[1:]))


def forward(runner: ModelRunner, parts: list[tuple[np.ndarray, int, np.ndarray]], *,
            every_row: bool = True) -> torch.Tensor:
    """Logits of ``(tokens, start, page_ids)`` of each request."""
    total = sum(len(tokens) for tokens, _, _ in parts)
    rows = [row_of(runner, *part) for part in parts]
    batch = build_forward_batch(rows, runner.layout.page_size, runner.device,
                                list(range(total)) if every_row else None)
    return runner.forward(batch)


def logits_of(folder: Path | str, tokens: np.ndarray, **model: Any) -> torch.Tensor:
    """Logits of a prompt by the checkpoint in ``folder``; ``model`` as for ``server_config``."""
    runner = load_runner(server_config(folder, **model))
    return forward(runner, [(tokens, 0, scattered_pages(runner, 1, len(tokens))[0])])


def expected_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)[None]).logits[0]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own choice of ``count`` tokens."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt):]


def scattered_pages(runner: ModelRunner, requests: int, tokens: int) -> np.ndarray:
    """Distinct pages in random order, ``[requests, pages]``."""
    each = runner.layout.pages_for(tokens)
    return np.random.default_rng(1).permutation(runner.num_pages)[:requests * each].reshape(requests, each)


def check_chunks(runner, model, prompts, chunk: int, tolerance: float) -> None:
    """Prompts in chunks of ``chunk`` tokens, all but their last token, then that one in a joint decode step; logits
    against transformers' ``model``."""
    count = len(prompts)
    pages = scattered_pages(runner, count, 80)
    want = [expected_logits(model, prompt) for prompt in prompts]
    last = [len(prompt) - 1 for prompt in prompts]
    for start in range(0, max(last), chunk):
        rows = [(b, prompts[b][start:min(start + chunk, last[b])]) for b in range(count) if start < last[b]]
        got = forward(runner, [(part, start, pages[b]) for b, part in rows])
        expected = torch.cat([want[b][start:start + len(part)] for b, part in rows])
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    got = forward(runner, [(prompts[b][last[b]:], last[b], pages[b]) for b in range(count)])
    torch.testing.assert_close(got, torch.stack([w[-1] for w in want]), atol=tolerance, rtol=0)
