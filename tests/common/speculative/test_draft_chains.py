"""Chains that are drafted without the host, against plain torch: the logits of every draft, after steps whose void rows
and rejected drafts have left something else in their slots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.common.api.sampling import SamplingParams
from baton.common.config.server import ParallelArgs
from baton.common.forward.chain_batches import ChainBatches
from baton.common.sampling.chain_draft_sampling import ChainDraftSampling, best_token
from baton.common.speculative.base import ChainSampler, ChainStep
from baton.kernels.arguments import AcceptedChains, ChainPages, ChainState, KnownChains
from baton.kernels.speculative.accept_chains import accept_chains
from baton.kernels.speculative.place_chains import place_chains
from baton.tests.common.speculative.test_draft_models import (
    EAGLE,
    EAGLE3,
    TOLERANCE,
    draft,
    drafting_config,
    features_of,
    greedy_logits,
)
from baton.tests.helpers.deepseek_models import save_with_predictors
from baton.tests.helpers.draft_models import (
    add_nextn,
    reference_chain,
    save_eagle,
    save_eagle3,
    save_nextn,
    save_with_token_map,
)
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages

POISON = 1e3
LENGTH = 48


class Recording:
    """A sampler, by default of greedy requests, that keeps the logits and positions of each draft."""

    def __init__(self, sampler: ChainSampler = best_token) -> None:
        self._sampler = sampler
        self.logits: list[torch.Tensor] = []
        self.positions: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None,
                 token_ids: torch.Tensor | None = None) -> torch.Tensor:
        self.logits.append(logits.float().clone())
        self.positions.append(positions.tolist())
        return self._sampler(logits, positions, out, token_ids)


class Chained:
    """Requests of known ``texts``, whose first ``starts`` tokens are computed, stepped by chains of ``num_drafts``."""

    def __init__(self, runner: Any, texts: list[np.ndarray], starts: list[int], num_drafts: int):
        self.runner, self.texts, self.num_drafts = runner, texts, num_drafts
        # Pages end before the text: what is after them is in the scratch page.
        tables = scattered_pages(runner, len(texts), LENGTH)
        flat = torch.from_numpy(np.concatenate(tables).astype(np.int32))
        indptr = torch.arange(len(texts) + 1, dtype=torch.int32) * len(tables[0])
        self.pages = ChainPages(indptr, flat, runner.layout.page_size, runner.scratch_page, LENGTH)
        self.batches = ChainBatches.of(self.pages, {num_drafts + 1, num_drafts + 2})
        self.state = ChainState.empty(len(texts), num_drafts + 2, runner.device)
        self.positions = list(starts)
        for number, (text, start) in enumerate(zip(texts, starts)):
            draft(runner, [{"tokens": text[:start + 2], "pages": tables[number], "ids": text[:start].tolist(),
                            "start": 0}])

    @torch.inference_mode()
    def step(self, right: list[int], sampler: Recording | None = None) -> tuple[Recording, AcceptedChains]:
        """A step that follows the one before, in which so many drafts of each request are ``right``; those after them
        are not what the model samples. The drafts of the step before are overwritten, void rows for the last ones."""
        width = self.num_drafts + 1
        for number, (text, position, count) in enumerate(zip(self.texts, self.positions, right)):
            drafts = min(count + 1, self.num_drafts)
            self.state.positions[number], self.state.num_drafts[number] = position, drafts
            following = text[position + 1:position + 1 + drafts].copy()
            following[count:] = (following[count:] + 1) % 131
            self.state.tokens[number, 0] = int(text[position])
            self.state.tokens[number, 1:1 + drafts] = torch.from_numpy(following)
        count = len(self.texts)
        nothing = torch.zeros(count, dtype=torch.int64)
        known = KnownChains(nothing, torch.zeros(count, width, dtype=torch.int64), nothing)
        placed = place_chains(self.state, torch.arange(count), known, torch.full((count,), LENGTH), self.pages)
        samples = torch.full((count, width), 7)
        for number, (text, position) in enumerate(zip(self.texts, self.positions)):
            rows = right[number] + 1
            samples[number, :rows] = torch.from_numpy(text[position + 1:position + 1 + rows])
        features = self._features(placed)
        accepted = accept_chains(samples.flatten(), placed, self.state, self.pages, self.num_drafts)
        sampler = sampler or Recording()
        drafts = self.state.tokens[:, 1:1 + self.num_drafts]
        self.runner.drafter.draft_chains(ChainStep(placed, accepted, self.batches, features, drafts, sampler, LENGTH))
        self.positions = accepted.positions.tolist()
        return sampler, accepted

    def _features(self, placed: Any) -> torch.Tensor | None:
        wanted = self.runner.draft_model.features
        if wanted is None:
            return None
        batch = self.batches.of_rows(placed.rows)
        return self.runner._model.hidden_states_and_features(self.runner.plan(batch), wanted.layers)[1]

    def poison(self) -> None:
        """Overwrites all that is at or after the newest tokens, in both pools."""
        size = self.pages.page_size
        for number, position in enumerate(self.positions):
            ids = self.pages.kv_indices[self.pages.kv_indptr[number]:self.pages.kv_indptr[number + 1]].long()
            slots = torch.arange(position + 1 - int(self.runner.draft_model.shifted), LENGTH)
            for pool in (self.runner.pool, self.runner.draft_pool):
                for group in pool.groups:
                    group[ids[slots // size], ..., slots % size, :] = POISON

    def texts_now(self) -> list[np.ndarray]:
        return [text[:position + 1] for text, position in zip(self.texts, self.positions)]


def check_chains(runner: Any, wanted: Any, ids: list[int] | None, num_drafts: int = 4) -> None:
    """Steps in which all, some and no drafts are right; ``wanted(tokens, n)`` are the logits of n drafts."""
    rng = np.random.default_rng(7)
    chained = Chained(runner, [rng.integers(0, 131, LENGTH + 9) for _ in range(3)], [12, 21, 3], num_drafts)
    for right in ([2, 0, num_drafts], [0, 1, 1], [num_drafts, num_drafts, 0], [1, 0, 2]):
        right = [min(each, num_drafts) for each in right]
        sampler, accepted = chained.step(right)
        assert accepted.counts.tolist() == [each + 1 for each in right]
        for number, text in enumerate(chained.texts_now()):
            want = wanted(text, num_drafts)
            found = [logits[number] for logits in sampler.logits[:num_drafts]]
            torch.testing.assert_close(torch.stack(found), torch.stack(want), atol=TOLERANCE, rtol=0)
            columns = [int(row.argmax()) for row in want]
            drafts = chained.state.tokens[number, 1:1 + num_drafts].tolist()
            assert drafts == [column if ids is None else ids[column] for column in columns]
            assert [each[number] for each in sampler.positions[:num_drafts]] == list(
                range(len(text), len(text) + num_drafts))
        assert chained.state.positions.tolist() == chained.positions
        chained.poison()


def shifted(runner: Any, target: Any, reference: Any) -> Any:
    combine, layer, ids = reference

    def wanted(tokens: np.ndarray, count: int) -> list[torch.Tensor]:
        features = features_of(target, tokens[:-1], runner.draft_model.features.layers)
        return reference_chain(combine, layer, features, tokens, count, ids, runner.draft_model.network.depth)

    return wanted


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", ["authors", "whole vocabulary", "norm before fc", "norm of each state"])
def test_eagle3(tmp_path, layout, page_size):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle3(tmp_path / "draft", target, **EAGLE3[layout])
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3", page_size=page_size))
    check_chains(runner, shifted(runner, target, reference), reference[2])


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
def test_numbers_of_drafts(tmp_path, num_drafts):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle3(tmp_path / "draft", target)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))
    check_chains(runner, shifted(runner, target, reference), reference[2], num_drafts)


@pytest.mark.parametrize("layout", EAGLE)
def test_eagle(tmp_path, layout):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle(tmp_path / "draft", target, **EAGLE[layout])
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE"))
    check_chains(runner, shifted(runner, target, reference), reference[2])


def test_nextn(tmp_path):
    target = save_model(tmp_path / "model", "Qwen3")
    reference = save_nextn(tmp_path / "draft", target)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "NEXTN"))
    check_chains(runner, shifted(runner, target, reference), reference[2])


def test_latent_layer_with_experts(tmp_path):
    model, *layers = save_with_predictors(tmp_path, 1)
    runner = load_runner(drafting_config(tmp_path, None, "NEXTN"))

    def layer(index, hidden, ids):
        states = layers[index](hidden, ids)
        return model.lm_head(states), states

    check_chains(runner, shifted(runner, model, (lambda features: features, layer, None)), None)


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_several_layers_draft_a_token_each(tmp_path, num_drafts):
    """Where all drafts are right, so that the later layers have read them; with fewer drafts than layers, too."""
    target = save_model(tmp_path / "model", "Llama", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
                        rms_norm_eps=1e-5, head_dim=12)
    reference = add_nextn(tmp_path / "model", target, depth=2)
    runner = load_runner(drafting_config(tmp_path / "model", None, "NEXTN"))
    text = np.random.default_rng(3).integers(0, 131, LENGTH)
    chained = Chained(runner, [text], [12], num_drafts)
    sampler, _ = chained.step([num_drafts])
    (now,) = chained.texts_now()
    want = shifted(runner, target, reference)(now, num_drafts)
    assert len(sampler.logits) == max(2, num_drafts)
    torch.testing.assert_close(torch.cat(sampler.logits[:num_drafts]), torch.stack(want), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_standalone(tmp_path, page_size):
    """The newest token of the step before was not computed at first: no draft followed it."""
    save_model(tmp_path / "model", "Llama")
    small = save_model(tmp_path / "draft", "Qwen2", num_hidden_layers=2)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE", page_size=page_size))
    check_chains(runner, lambda tokens, count: greedy_logits(small, tokens, count), None)


def test_token_map(tmp_path):
    small, ids = save_with_token_map(tmp_path)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE",
                                         speculative_token_map=str(tmp_path / "map.txt")))

    def wanted(tokens: np.ndarray, count: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for _ in range(count):
            found.append(greedy_logits(small, tokens, 1)[0][ids])
            tokens = np.append(tokens, ids[int(found[-1].argmax())])
        return found

    check_chains(runner, wanted, ids)


def test_requests_at_the_end_of_their_pages(tmp_path):
    """Drafts beyond the pages and the context are stored in the scratch page; the others' are as alone."""
    target = save_model(tmp_path / "model", "Llama")
    save_eagle3(tmp_path / "draft", target)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))
    texts = [np.random.default_rng(number).integers(0, 131, LENGTH + 9) for number in range(2)]
    both, alone = Chained(runner, texts, [LENGTH - 3, 20], 4), Chained(runner, texts[1:], [20], 4)
    sampler, accepted = both.step([2, 1])
    expected, _ = alone.step([1])
    assert accepted.positions.tolist() == [LENGTH, 22]
    torch.testing.assert_close(torch.stack(sampler.logits)[:, 1], torch.stack(expected.logits)[:, 0])
    assert torch.isfinite(torch.stack(sampler.logits)).all()
    sampler, accepted = both.step([0, 2])
    expected, _ = alone.step([2])
    assert accepted.counts.tolist() == [0, 3] and accepted.positions.tolist() == [LENGTH, 25]
    torch.testing.assert_close(torch.stack(sampler.logits)[:, 1], torch.stack(expected.logits)[:, 0])


def drafts_by_each(folder: Path, size: int, parallel: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By each algorithm the logits of the drafts of some requests, which each rank samples for itself, and these."""
    found = {}
    params = [SamplingParams(seed=1), SamplingParams(temperature=0.0),
              SamplingParams(seed=3, top_k=20, temperature=0.7)]
    for name in ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE"):
        flags = {"speculative_token_map": str(folder / "map.txt")} if name == "EAGLE" else {}
        config = drafting_config(folder / "model", folder / name, name, **flags)
        runner = load_runner(dataclasses.replace(config, parallel=ParallelArgs(tp_size=size)), parallel)
        rng = np.random.default_rng(7)
        chained = Chained(runner, [rng.integers(0, 131, LENGTH) for _ in params], [12, 21, 3], 3)
        sampling = ChainDraftSampling(len(params), runner.device)
        sampling.update(params)
        recording = Recording(sampling(len(params), False))
        drafts = []
        for right in ([2, 0, 3], [0, 1, 1]):
            chained.step(right, recording)
            drafts.append(chained.state.tokens[:, 1:4].clone())
        found[name] = torch.stack(recording.logits), torch.stack(drafts)
    return found


def test_ranks_draft_alike(tmp_path):
    """Two ranks of a tensor-parallel group have the same logits, bit by bit, and sample the same drafts from them."""
    target = save_model(tmp_path / "model", "Llama")
    save_eagle3(tmp_path / "EAGLE3", target)
    save_eagle(tmp_path / "EAGLE", target)
    save_nextn(tmp_path / "NEXTN", target)
    save_model(tmp_path / "STANDALONE", "Qwen2")
    (tmp_path / "map.txt").write_text(" ".join(map(str, range(0, 131, 2))))
    want = drafts_by_each(tmp_path, 1, None)
    first, second = run_ranks(Path(__file__).with_name("chain_rank.py"), 2, tmp_path, str(tmp_path))
    for name, (logits, drafts) in want.items():
        assert torch.equal(first[name][0], second[name][0]) and torch.equal(first[name][1], second[name][1])
        torch.testing.assert_close(first[name][0], logits, atol=TOLERANCE, rtol=0)
        assert torch.equal(first[name][1], drafts)
