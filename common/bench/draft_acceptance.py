"""``bench_draft_acceptance``: how often a checkpoint's MTP layers predict the tokens that its model samples.

Speculative decoding makes one token a step and one more for each accepted draft: this is the upper bound of its win,
before the cost of its longer steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ..api.errors import ConfigError
from ..attention.workspace import AttentionWorkspace
from ..config.cli import parse
from ..config.server import ServerConfig
from ..distributed.parallel import Parallel
from ..engine.rank import join_groups
from ..engine.rank_spec import RankSpec
from ..forward.forward_batch import ForwardBatch, Row, build_forward_batch
from ..forward.step_context import StepContext
from ..models.registry import load_model_spec
from ..runner.model_runner import ModelRunner
from ..speculative.draft.checkpoint import draft_attention
from ..speculative.draft.shifted import ShiftedDraftModel
from ..weights.loader import silent
from .command import reported
from .draft_args import BenchDraft
from .report.progress import Progress
from .report.report import append_line, check_writable
from .workloads.own_workload import own_workload
from .workloads.workload import Turn


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchDraft, argv, prog="bench_draft_acceptance", description=(
        "Measure how often a model's MTP layers draft the token that it samples."))
    sys.exit(reported("bench_draft_acceptance", lambda: run(config)))


@dataclass(frozen=True)
class Acceptance:
    """``accepted[k]`` of ``steps`` positions in greedy answers had their first k + 1 drafts accepted."""

    steps: int
    accepted: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.steps + other.steps, tuple(a + b for a, b in zip(self.accepted, other.accepted)))

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / max(self.steps, 1)


def run(config: BenchDraft) -> int:
    check_writable(config.draft.output_file, "--output-file")
    spec = load_model_spec(config.model)
    turns = [conversation.turns[0] for conversation in own_workload(config.dataset, config.model)]
    longest = max(turn.prompt.num_tokens + turn.output_len for turn in turns)
    if longest > spec.context_length:
        raise ConfigError(f"{longest} tokens of prompt and answer are more than the model's context of "
                          f"{spec.context_length}; shorten them, or set --context-length.")
    drafting = Drafting.load(config.server(longest))
    progress = Progress("answers", len(turns), disabled=config.draft.disable_progress)
    found = Acceptance(0, (0,) * drafting.depth)
    for turn in turns:
        found += drafting.measure(turn)
        progress.advance(f"{found.tokens_per_step:.2f} tokens a step")
    progress.close()
    print(_table(config, found), flush=True)
    if config.draft.output_file is not None:
        append_line(config.draft.output_file, {
            "tag": config.draft.tag, "model_path": config.model.model_path, **asdict(config.dataset),
            **asdict(found), "tokens_per_step": found.tokens_per_step})
    return 0


def _table(config: BenchDraft, found: Acceptance) -> str:
    lines = [f"{config.model.model_path}: {found.steps:,} positions in greedy answers"]
    for depth, accepted in enumerate(found.accepted, 1):
        lines.append(f"drafts right, first {depth:<4}{accepted / max(found.steps, 1):8.1%}")
    return "\n".join([*lines, f"tokens a step         {found.tokens_per_step:8.2f}"])


class DraftLayers:
    """A runner's layers of multi-token prediction, each of which reads the true tokens."""

    def __init__(self, runner: ModelRunner):
        assert isinstance(runner.draft_model, ShiftedDraftModel) and runner.draft_pool is not None
        self._model = model = runner.draft_model
        self._attention = draft_attention(model.context, model.spec, runner.draft_pool)
        self._workspace = AttentionWorkspace(runner.device)

    def __len__(self) -> int:
        return self._model.network.depth

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, hidden: torch.Tensor, next_ids: torch.Tensor) -> list[torch.Tensor]:
        """Returns each layer's hidden states ``[T, hidden]``, for the head: the first layer's predict the tokens two
        positions after the batch's tokens, each further layer's those one position later.

        ``hidden`` [T, hidden] are the model's of ``batch``, after its final norm; ``next_ids`` [layers, T] int64 are
        the tokens one position after the batch's, then two.
        """
        step = StepContext(batch, self._attention.plan(batch, self._workspace))
        states = []
        for layer, ids in enumerate(next_ids):
            hidden = self._model.network(layer, ids, hidden, step).hidden
            states.append(hidden)
        return states

    @torch.inference_mode()
    def propose(self, batch: ForwardBatch, hidden: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Returns draft tokens ``[layers, T]`` int64, the argmax of each layer; see ``hidden_states``."""
        return torch.stack([self._model.head.table.logits(rows).argmax(-1)
                            for rows in self.hidden_states(batch, hidden, next_ids)])


class Drafting:
    """A model and its MTP layers over one sequence at a time, on pages from 0."""

    def __init__(self, runner: ModelRunner, layers: DraftLayers, chunk: int):
        self._runner = runner
        self._layers = layers
        self._chunk = chunk
        self._pages = np.arange(runner.num_pages, dtype=np.int32)

    @classmethod
    def load(cls, config: ServerConfig, parallel: Parallel | None = None) -> Drafting:
        """Raises ConfigError. ``parallel``: this rank's groups, where several ranks run this alike."""
        spec = load_model_spec(config.model)
        if spec.state is not None:
            raise ConfigError("bench_draft_acceptance does not keep states of recurrent layers: serve the model with "
                              "--speculative-algorithm NEXTN, and read what bench_serving reports of drafts.")
        parallel = parallel or join_groups(RankSpec(config, 0, 1, "", "", ""))
        runner = ModelRunner.load(config, spec, parallel, parallel.world.device, silent)
        return cls(runner, DraftLayers(runner), config.schedule.largest_prefill(spec.context_length))

    @property
    def depth(self) -> int:
        """Drafts of a step."""
        return len(self._layers)

    def measure(self, turn: Turn) -> Acceptance:
        """Compare drafts with the model's greedy answer of ``turn.output_len`` tokens."""
        assert turn.prompt.ids is not None
        prompt = list(turn.prompt.ids)
        ids = np.array(self._answered(prompt, turn.output_len), np.int64)
        drafts = self._draft_tokens(ids)  # [depth, len(ids)]
        # A step starts at the last known token and samples the next one; its drafts are the tokens after that.
        positions = np.arange(len(prompt) - 1, len(ids) - 1 - self.depth)
        matches = np.array([row[positions] == ids[positions + 2 + k] for k, row in enumerate(drafts)], bool)
        accepted = np.logical_and.accumulate(matches, axis=0)
        return Acceptance(len(positions), tuple(int(count) for count in accepted.sum(axis=1)))

    def _answered(self, ids: list[int], count: int) -> list[int]:
        """``ids`` and the next ``count`` greedy tokens."""
        ids = list(ids)
        at = 0
        for _ in range(count):
            while len(ids) - at > self._chunk:
                self._logits(ids[at:at + self._chunk], at)
                at += self._chunk
            ids.append(int(self._logits(ids[at:], at).argmax()))
            at = len(ids) - 1
        return ids

    def _logits(self, ids: list[int], start: int) -> torch.Tensor:
        batch = build_forward_batch([Row(ids, start, self._pages)], self._runner.layout.page_size, self._runner.device)
        return self._runner.forward(batch)[-1]

    def _draft_tokens(self, ids: np.ndarray) -> np.ndarray:
        """``[depth, len(ids)]``: the draft of each MTP layer after every token; reads zeros beyond the last."""
        depth = self.depth
        padded = np.concatenate([ids, np.zeros(depth, np.int64)])
        parts = []
        for start in range(0, len(ids), self._chunk):
            part = ids[start:start + self._chunk]
            batch = build_forward_batch([Row(part, start, self._pages)], self._runner.layout.page_size,
                                        self._runner.device, list(range(len(part))))
            following = np.stack([padded[start + 1 + k:start + 1 + k + len(part)] for k in range(depth)])
            hidden = self._runner.hidden_states(batch)
            parts.append(self._layers.propose(batch, hidden, torch.from_numpy(following).to(hidden.device)).cpu())
        return torch.cat(parts, dim=1).numpy()
