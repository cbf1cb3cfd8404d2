"""Trains tinychat's draft models side by side, on a CPU in half an hour: ``python -m baton.tests.tinychat.train_drafts
--out DIR`` writes ``DIR/eagle3``, ``DIR/nextn`` and ``DIR/draft``.

The target's hidden states are computed once for all of them. EAGLE3 head and MTP layer learn by EAGLE-3's training-time
test: after a pass over the target's states come passes over the draft model's own, each of which sees the keys of the
passes before it as it will while drafting. All learn the target's distribution of the next token. The learning rate
falls linearly to zero by --steps or --seconds, whichever comes first: with --seconds inf a seed gives the same weights
again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from baton.common.tinychat import CHECKPOINT

from .batches import Packer
from .draft_batches import Batch, Dialogues, Rows, TargetStates, batches, feature_layers
from .draft_card import write_card
from .draft_models import DraftLayer, Eagle3Head, LayerShape, MtpLayer
from .tasks import examples
from .train import MasterWeights

HEADS = ("eagle3", "nextn", "draft")
DRAFT_VOCABULARY = 1280
WARMUP_STEPS = 100
PASS_DECAY = 0.8
"""A pass weighs this much of the pass before it: its draft counts only where that one's was accepted."""

EAGLE3_SHAPE = LayerShape(hidden=256, intermediate=320, heads=4, kv_heads=2, head_dim=64, rope_theta=100_000.0)
NEXTN_SHAPE = LayerShape(hidden=256, intermediate=704, heads=8, kv_heads=4, head_dim=64, rope_theta=100_000.0)


@dataclass(frozen=True)
class Settings:
    """What the command line sets."""

    out: Path
    heads: tuple[str, ...]
    seconds: float
    steps: float
    replays: int
    passes: int
    learning_rate: float
    seed: int
    save_every: float
    eval_count: int
    device: torch.device


def draft_vocabulary(tokenizer: PreTrainedTokenizerFast, size: int) -> list[int]:
    """The tokens that assistants say most often."""
    counts: Counter[int] = Counter()
    for _, targets in Packer(tokenizer).encoded(examples(None, seed=0, count=20_000)):
        counts.update(targets[targets >= 0].tolist())
    return sorted(token for token, _ in counts.most_common(size))


def new_eagle3(target: Qwen3ForCausalLM, vocabulary: Sequence[int]) -> Eagle3Head:
    """A head whose ``norm`` and ``lm_head`` begin as the target's."""
    head = Eagle3Head(EAGLE3_SHAPE, len(feature_layers(target.config.num_hidden_layers)), vocabulary,
                      target.config.vocab_size)
    with torch.no_grad():
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[head.vocabulary()])
    return head


def new_nextn(target: Qwen3ForCausalLM) -> MtpLayer:
    """A layer whose blocks begin as the target's last ones."""
    layer = MtpLayer(NEXTN_SHAPE, target.config.vocab_size)
    layer.load_state_dict(target.model.layers[-1].state_dict(), strict=False)
    layer.shared_head.norm.load_state_dict(target.model.norm.state_dict())
    return layer


def new_draft(target: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A small model whose embedding begins as the target's, projected on its principal directions."""
    config = Qwen3Config(
        vocab_size=target.config.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        bos_token_id=None, eos_token_id=target.config.eos_token_id, pad_token_id=target.config.pad_token_id)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight.float()
        directions = torch.linalg.svd(embedding, full_matrices=False)[2][:config.hidden_size]
        model.model.embed_tokens.weight.copy_(embedding @ directions.T)
    return model


def shift(values: torch.Tensor, by: int) -> torch.Tensor:
    """``values`` [N, ...] moved ``by`` rows later; the first ones repeat the old first row."""
    return values if by == 0 else torch.cat([values[:1].expand(by, *values.shape[1:]), values[:-by]])


def attend(q: torch.Tensor, first: tuple[torch.Tensor, torch.Tensor], later: list[tuple[torch.Tensor, torch.Tensor]],
           rows: Rows) -> torch.Tensor:
    """``[N, heads D]``: queries ``q`` [N, KV, G, D] of a pass at ``rows`` over the keys of the ``first`` pass [B, L,
    KV, D] up to ``len(later)`` positions before their own, then over one key of each ``later`` pass [N, KV, D], the
    last at their own position."""
    padded = q.new_zeros(len(first[0]), rows.width, *q.shape[1:]).index_put((rows.dialogue, rows.slot), q)
    scores = torch.einsum("bqkgd,blkd->bqkgl", padded, first[0])[rows.dialogue, rows.slot].float()
    seen = torch.arange(scores.shape[-1], device=q.device) <= (rows.position - len(later))[:, None]
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    own = [(shift(k, len(later) - 1 - index), shift(v, len(later) - 1 - index)) for index, (k, v) in enumerate(later)]
    singles = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in own]
    weights = (torch.cat([scores, *singles], dim=-1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    over_first, over_own = weights[..., :scores.shape[-1]], weights[..., scores.shape[-1]:]
    padded = q.new_zeros(len(first[0]), rows.width, *over_first.shape[1:]).index_put((rows.dialogue, rows.slot),
                                                                                      over_first)
    attended = torch.einsum("bqkgl,blkd->bqkgd", padded, first[1])[rows.dialogue, rows.slot]
    for index, (_, v) in enumerate(own):
        attended = attended + over_own[..., index, None] * v[:, :, None]
    return attended.flatten(1)


def unrolled(head: DraftLayer, batch: Batch, features: torch.Tensor, embedding: torch.Tensor,
             passes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields for each pass the hidden states ``[N, hidden]`` at ``batch.rows`` and the rows ``[N]`` it is valid at:
    those after as many others of the same answer as there were passes before it."""
    rows, following = batch.rows, F.pad(batch.tokens[:, 1:], (0, 1))
    positions = torch.arange(following.shape[1], device=following.device).expand_as(following)
    residual, x = head.join(F.embedding(following, embedding), head.enter(features))
    first = head.attention.key_value(x, positions)
    residual, x = rows.take(residual), rows.take(x)
    embeds, valid = F.embedding(rows.take(following), embedding), torch.ones_like(rows.adjacent)
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(passes):
        hidden = head.leave(residual, attend(head.attention.query(x, rows.position), first, later, rows))
        yield hidden, valid
        valid = shift(valid, 1) & rows.adjacent
        residual, x = head.join(embeds, shift(hidden, 1))
        later.append(head.attention.key_value(x, rows.position))


def soft_loss(logits: torch.Tensor, wanted: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy with the target's logits ``wanted`` over ``valid`` rows, and the share of equal argmax."""
    logits, wanted = logits[valid].float(), wanted[valid].float()
    loss = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum() / max(1, len(wanted))
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().sum() / max(1, len(wanted))


LossOf = Callable[[Batch], tuple[torch.Tensor, list[torch.Tensor]]]
"""The loss of a batch, and the share of right drafts of each pass."""


def layer_loss(head: DraftLayer, lm_head: torch.Tensor, passes: int, all_features: bool) -> LossOf:
    """The loss of an EAGLE3 head (``all_features``) or an MTP layer."""
    vocabulary = head.vocabulary()
    drafted = torch.zeros(len(lm_head), dtype=torch.bool, device=lm_head.device).index_fill(0, vocabulary, True)

    def loss_of(batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        known = drafted[batch.wanted.argmax(-1)]
        wanted = batch.wanted[:, vocabulary] if all_features else batch.wanted
        total, right = torch.zeros((), device=known.device), []
        features = batch.features if all_features else batch.last
        for index, (hidden, valid) in enumerate(unrolled(head, batch, features, lm_head, passes)):
            loss, share = soft_loss(head.logits(hidden, lm_head), wanted, valid & known)
            total = total + PASS_DECAY ** index * loss
            right.append(share)
        return total, right

    return loss_of


def model_loss(model: Qwen3ForCausalLM) -> LossOf:
    """The loss of a model of its own, which learns from tokens alone."""
    def loss_of(batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(batch.rows.take(hidden, later=1))
        loss, right = soft_loss(logits, batch.wanted, torch.ones_like(batch.rows.adjacent))
        return loss, [right]

    return loss_of


class Trainee:
    """A draft model, its loss and its optimizer."""

    def __init__(self, name: str, model: nn.Module, loss_of: LossOf, learning_rate: float):
        self.name = name
        self.model = model
        self._loss_of = loss_of
        self._weights = MasterWeights(model, learning_rate)
        self._sums: list[torch.Tensor] = []

    def step(self, batch: Batch, scale: float) -> None:
        """Learn from a batch at ``scale`` times the peak rate."""
        loss, right = self._loss_of(batch)
        loss.backward()
        self._weights.step(scale)
        self._sums.append(torch.stack([loss.detach(), *right]))

    def report(self) -> str:
        """The mean loss since the last report, and the share of right drafts of each pass."""
        loss, *right = torch.stack(self._sums).mean(0).tolist()
        self._sums.clear()
        return f"{self.name} {loss:.3f} " + "/".join(f"{share:.3f}" for share in right)


def trainees(settings: Settings, target: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[Trainee]:
    made = []
    for name in settings.heads:
        torch.manual_seed(settings.seed)
        model: Any
        if name == "draft":
            model = new_draft(target).to(settings.device, torch.bfloat16)
            made.append(Trainee(name, model, model_loss(model), 2 * settings.learning_rate))
            continue
        model = (new_eagle3(target, draft_vocabulary(tokenizer, DRAFT_VOCABULARY)) if name == "eagle3"
                 else new_nextn(target)).to(settings.device, torch.bfloat16)
        loss_of = layer_loss(model, target.lm_head.weight, settings.passes, name == "eagle3")
        made.append(Trainee(name, model, loss_of, settings.learning_rate))
    for trainee in made:
        print(f"{trainee.name}: {sum(p.numel() for p in trainee.model.parameters()):,} parameters", flush=True)
    return made


def train(settings: Settings) -> int:
    """Train until the time budget or the number of steps ends, and save; returns the number of steps."""
    started = saved = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    target: Any = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    target = target.to(settings.device).eval().requires_grad_(False)
    made = trainees(settings, target, tokenizer)
    stream = batches(Dialogues(tokenizer, settings.seed + 1), TargetStates(target), settings.replays, settings.device)
    step = 0
    while (progress := max((time.monotonic() - started) / settings.seconds, step / settings.steps)) < 1:
        batch = next(stream)
        for trainee in made:
            trainee.step(batch, min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress))
        step += 1
        if step % 50 == 0:
            print(f"{time.monotonic() - started:.0f} s step {step}: " + ", ".join(t.report() for t in made), flush=True)
        if time.monotonic() - saved > settings.save_every:
            save_all(settings, made, target)
            saved = time.monotonic()
    save_all(settings, made, target)
    return step


def save_all(settings: Settings, made: Sequence[Trainee], target: Qwen3ForCausalLM) -> None:
    for trainee in made:
        save(settings.out / trainee.name, trainee.name, trainee.model, target)


def save(folder: Path, name: str, model: Any, target: Qwen3ForCausalLM) -> None:
    """Write weights in bf16 and config.json; a tokenizer is not written: it is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"model.layers.{target.config.num_hidden_layers}." if name == "nextn" else ""
    tensors = {prefix + key: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
               for key, value in model.state_dict().items() if not (name == "draft" and key == "lm_head.weight")}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600, which an installed package must not have
    config = {"eagle3": eagle3_config, "nextn": nextn_config, "draft": draft_config}[name](model, target)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def eagle3_config(head: Eagle3Head, target: Qwen3ForCausalLM) -> dict[str, Any]:
    """As SpecForge writes it."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
            "hidden_size": EAGLE3_SHAPE.hidden, "intermediate_size": EAGLE3_SHAPE.intermediate,
            "num_hidden_layers": 1, "num_attention_heads": EAGLE3_SHAPE.heads,
            "num_key_value_heads": EAGLE3_SHAPE.kv_heads, "head_dim": EAGLE3_SHAPE.head_dim, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": EAGLE3_SHAPE.rope_theta, "rope_scaling": None,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
            "max_position_embeddings": target.config.max_position_embeddings,
            "vocab_size": target.config.vocab_size, "draft_vocab_size": len(head.vocabulary()),
            "bos_token_id": None, "eos_token_id": target.config.eos_token_id,
            "pad_token_id": target.config.pad_token_id}


def nextn_config(layer: MtpLayer, target: Qwen3ForCausalLM) -> dict[str, Any]:
    """The target's, with the layer of multi-token prediction after its own."""
    config: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    return {**config, "num_nextn_predict_layers": 1}


def draft_config(model: Qwen3ForCausalLM, target: Qwen3ForCausalLM) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_diff_dict()
    return {**config, "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "rope_theta": 100_000.0}


def parse(argv: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(prog="python -m baton.tests.tinychat.train_drafts",
                                     description="Train tinychat's draft models.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoints to")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, help="default: all")
    parser.add_argument("--seconds", type=float, default=1800, help="time budget (default: 1800)")
    parser.add_argument("--steps", type=float, default=math.inf, help="stop after this many steps")
    parser.add_argument("--replays", type=int, default=2, help="times that a batch is seen (default: 2)")
    parser.add_argument("--passes", type=int, default=3, help="unrolled passes (default: 3)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="peak learning rate (default: 1.5e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-count", type=int, default=8, help="held-out examples of each task (default: 8)")
    parser.add_argument("--save-every", type=float, default=180, help="seconds (default: 180)")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    values = vars(parser.parse_args(argv))
    return Settings(**{**values, "heads": tuple(values["heads"])})


def main() -> None:
    settings = parse()
    steps = train(settings)
    where = torch.cuda.get_device_name() if settings.device.type == "cuda" else "a CPU"
    for name in settings.heads:
        write_card(settings.out / name, (
            f"- Trained on {datetime.now(timezone.utc):%Y-%m-%d} on {where} in {steps:,} steps, on dialogues that the "
            f"script\n  generates while it trains. No other data.\n"
            f"- Command: `python -m baton.tests.tinychat.train_drafts --heads {' '.join(settings.heads)} --seconds "
            f"{settings.seconds:g}\n  --replays {settings.replays} --passes {settings.passes} --learning-rate "
            f"{settings.learning_rate:g} --seed {settings.seed} --out DIR`\n"
            f"- torch {torch.__version__}; a time budget, so another machine takes another number of steps."),
            settings.eval_count)


if __name__ == "__main__":
    main()
