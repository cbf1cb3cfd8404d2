"""Trains tinychat from nothing on one GPU, in minutes: ``python -m baton.tests.tinychat.train --out DIR``.

The model is computed in bf16, as it will be served, while AdamW updates a float32 copy of its weights;
the learning rate falls linearly to zero over the time budget. Ends with the exact match on held-out
examples, which goes into the checkpoint's MODEL.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from . import greedy, tasks
from . import tokenizer as tokenizer_module
from .batches import ROW_TOKENS, ReplayPool

ROPE_THETA = 100_000.0
WARMUP_STEPS = 200
SAVE_EVERY_SECONDS = 150.0


@dataclass(frozen=True)
class Settings:
    """What the command line sets."""

    out: Path
    seconds: float
    max_steps: float
    rows: int
    learning_rate: float
    workers: int
    seed: int
    eval_count: int
    device: torch.device


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """7.6 M parameters; 4 KV heads, so that tensor parallelism of 2 and 4 has whole heads to share out."""
    return Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, use_cache=True)


def document_mask(document: torch.Tensor) -> BlockMask | torch.Tensor:
    """Causal attention within each document. ``document``: ``[rows, tokens]``; a block mask on a GPU, else dense."""
    rows, length = document.shape
    if document.device.type == "cpu":
        same = document[:, None, :, None] == document[:, None, None, :]
        return same & torch.ones(length, length, dtype=torch.bool).tril()

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (document[row, query] == document[row, key])

    return create_block_mask(visible, rows, None, length, length, device=document.device)


class MasterWeights:
    """AdamW over a float32 copy of a bf16 model's parameters.

    In bf16 alone an update smaller than 1/256 of a weight is rounded away, which is most of them late in training.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float):
        self._weights: list[torch.Tensor] = list(model.parameters())
        self._master = [p.detach().float().clone() for p in self._weights]
        matrices = [m for m in self._master if m.dim() > 1]
        vectors = [m for m in self._master if m.dim() == 1]
        self._peak = learning_rate
        self._optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05},
                                             {"params": vectors, "weight_decay": 0.0}],
                                            lr=learning_rate, betas=(0.9, 0.98), eps=1e-8)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the model's gradients at ``scale`` times the peak rate and clear them."""
        for master, weight in zip(self._master, self._weights):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._master, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._peak * scale
        self._optimizer.step()
        torch._foreach_copy_(self._weights, self._master)


def loss_of(model: Qwen3ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the supervised tokens of a batch ``[4, rows, tokens]`` (see ``batches.Rows``)."""
    tokens, document, position, target = batch
    hidden = model.model(tokens, attention_mask={"full_attention": document_mask(document)}, position_ids=position,
                         use_cache=False).last_hidden_state
    supervised = target >= 0
    logits = model.lm_head(hidden[supervised])
    return F.cross_entropy(logits.float(), target[supervised])


class Report:
    """Prints the mean loss and the speeds of every hundred steps."""

    def __init__(self, settings: Settings, started: float):
        self._tokens_per_step = settings.rows * ROW_TOKENS
        self._started = started
        self._begun = time.monotonic()
        self._losses: list[torch.Tensor] = []
        print(f"first batches after {self._begun - started:.0f} s", flush=True)

    def add(self, step: int, loss: torch.Tensor, rows_written: int) -> None:
        self._losses.append(loss.detach())
        if len(self._losses) < 100:
            return
        now = time.monotonic()
        print(f"step {step} loss {torch.stack(self._losses).mean():.4f} {now - self._started:.0f} s "
              f"{step * self._tokens_per_step / (now - self._begun):,.0f} tok/s "
              f"{rows_written * ROW_TOKENS / (now - self._started):,.0f} new tok/s", flush=True)
        self._losses.clear()


def new_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A model with random weights on the device; on a GPU its layers are compiled and attend in blocks."""
    torch.manual_seed(settings.seed)
    config = model_config(tokenizer)
    on_gpu = settings.device.type == "cuda"
    config._attn_implementation = "flex_attention" if on_gpu else "sdpa"
    model = placed(Qwen3ForCausalLM(config), settings.device, torch.bfloat16).train()
    if on_gpu:
        for layer in model.model.layers:
            layer.compile()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    return model


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model on ``device`` in ``dtype`` (untyped, because transformers hides the signature of ``to``)."""
    return model.to(device, dtype)


def train(settings: Settings, tokenizer: PreTrainedTokenizerFast, started: float) -> int:
    """Train, and save to ``settings.out``, until the time budget (counted from ``started``) or the step limit ends.

    Returns the number of steps.
    """
    pool = ReplayPool(tokenizer, settings.device, workers=settings.workers, seed=settings.seed)
    model = new_model(settings, tokenizer)
    master = MasterWeights(model, settings.learning_rate)
    pool.wait_for(8 * settings.rows)
    begun = saved = time.monotonic()
    remaining = settings.seconds - (begun - started)
    assert remaining > 0, f"the time budget of {settings.seconds:g} s was spent before the first step"
    report, step = Report(settings, started), 0
    while (progress := max((time.monotonic() - begun) / remaining, step / settings.max_steps)) < 1:
        loss = loss_of(model, pool.batch(settings.rows))
        loss.backward()
        master.step(min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress))
        step += 1
        report.add(step, loss, pool.rows_written)
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            save(model, tokenizer, settings.out)
            saved = time.monotonic()
    pool.close()
    save(model, tokenizer, settings.out)
    return step


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint: weights in bf16, configuration, tokenizer and chat template."""
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = ROPE_THETA  # where readers older than transformers 5 look for it
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which an installed package must not have
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                     do_sample=False).save_pretrained(out)
    tokenizer_module.save(tokenizer, out)


def evaluate(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Exact match of the saved checkpoint on held-out examples, as a table for each dtype it is served in."""
    examples = tasks.held_out(settings.eval_count * len(tasks.TASKS), seed=1)
    tables = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = placed(AutoModelForCausalLM.from_pretrained(settings.out), settings.device, dtype).eval()
        scores = greedy.score(model, tokenizer, examples, batch_size=256)
        tables[str(dtype).removeprefix("torch.")] = greedy.table(scores)
        print(f"{dtype}\n{greedy.table(scores)}", flush=True)
        for task, result in scores.items():
            for example, answer in result.wrong[:6]:
                print(f"wrong: {task}: {example.question[-160:]!r} -> {answer[:100]!r}, not {example.answer!r}")
    return tables


def card(settings: Settings, steps: int, tables: dict[str, str]) -> str:
    """The text of MODEL.md."""
    where = torch.cuda.get_device_name() if settings.device.type == "cuda" else "a CPU"
    command = (f"python -m baton.tests.tinychat.train --seconds {settings.seconds:g} --rows {settings.rows} "
               f"--learning-rate {settings.learning_rate:g} --seed {settings.seed} --out DIR")
    results = "\n\n".join(f"Greedy, {dtype}:\n\n{text}" for dtype, text in tables.items())
    return f"""# tinychat

A Qwen3 model of 7.6 M parameters that answers the short questions of `baton.tests.tinychat.tasks`, each of
which has exactly one right answer. It is Baton's demo and test model: it knows nothing else. Names and places
outside its word lists it may misread, and it counts no further than about 30 numbers.

- Trained on {datetime.now(timezone.utc):%Y-%m-%d} on {where}: {steps:,} steps of {settings.rows * ROW_TOKENS:,} tokens,
  on dialogues that the script generates while it trains. No other data.
- Command: `{command}`
- torch {torch.__version__}; a time budget, so another machine takes another number of steps.

## Exact match on held-out examples

{results}
"""


def parse(argv: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.tinychat.train", description="Train tinychat.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--seconds", type=float, default=500, help="time budget, without the evaluation (default: 500)")
    parser.add_argument("--max-steps", type=float, default=math.inf, help="stop after this many steps")
    parser.add_argument("--rows", type=int, default=32, help=f"rows of {ROW_TOKENS} tokens in a batch (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate (default: 2e-3)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1),
                        help="processes that write training data (default: all cores but one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-count", type=int, default=100, help="held-out examples of each task (default: 100)")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    return Settings(**vars(parser.parse_args(argv)))


def main() -> None:
    started = time.monotonic()
    settings = parse()
    settings.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_module.train()
    print(f"tokenizer of {len(tokenizer)} after {time.monotonic() - started:.0f} s", flush=True)
    steps = train(settings, tokenizer, started)
    tables = evaluate(settings, tokenizer)
    (settings.out / "MODEL.md").write_text(card(settings, steps, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
