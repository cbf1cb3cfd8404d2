"""What an engine reports of its drafts, and an engine whose acceptance is simulated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.common.api.drafts import Drafts
from baton.common.execution.simulated_samples import SimulatedSamples
from baton.common.sampling.sampled_tokens import SampledTokens
from baton.common.sampling.sampler import Sample
from baton.common.speculative.verify import accept
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import save_steep_qwen3

VOCAB = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_steep_qwen3(folder, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024)
    return folder


class Counting:
    """Drafts the numbers after the newest token."""

    def propose(self, reqs, limits):
        return [Drafts(tuple((int(req.tokens.view()[-1]) + 1 + i) % VOCAB for i in range(limit))) if limit else None
                for req, limit in zip(reqs, limits)]

    def on_verified(self, req, drafts, num_accepted):
        ended = req.finish is not None
        assert ended or tuple(req.tokens.view()[-1 - num_accepted:-1].tolist()) == drafts.tokens[:num_accepted]

    def on_end(self, reqs):
        pass


def run(checkpoint, count=8, **options):
    engine = Engine(checkpoint, proposer=Counting(), max_drafts=3, **options)
    for number in range(count):
        engine.start(f"r{number}", [number, 5, 7], max_new_tokens=100)
    outputs = engine.run()
    reports = {item.rid: item.speculation for item in outputs if item.finish is not None}
    return engine, tokens_of(outputs), reports


def test_simulated_acceptance_has_the_given_mean_and_marks_its_reports(checkpoint):
    engine, tokens, reports = run(checkpoint, 16, simulated=(0.83, 0.6, 0.45))
    assert all(len(found) == 100 for found in tokens.values())
    gauges = engine.scheduler.gauges
    assert gauges["spec_accept_length"] == pytest.approx(2.88, abs=0.2)
    steps = sum(report.num_steps for report in reports.values())
    assert 16 * 99 / steps == pytest.approx(2.88, abs=0.1)
    assert tokens == run(checkpoint, 16, simulated=(0.83, 0.6, 0.45), page_size=16)[1]  # drawn from a hash


def test_acceptance_of_0_and_of_1_is_what_it_says(checkpoint):
    for share, most in ((0.0, 0), (1.0, 3)):
        _, _, reports = run(checkpoint, simulated=(share,) * 3)
        for report in reports.values():
            assert np.argmax(report.histogram) == most and sum(report.histogram[:-1]) <= 1


def test_reports_agree_with_the_engine_and_with_the_tokens(checkpoint):
    engine, tokens, reports = run(checkpoint)
    counters = engine.scheduler.counters
    assert sum(report.num_drafts for report in reports.values()) == counters["spec_draft_tokens"] > 0
    assert sum(report.num_accepted for report in reports.values()) == counters["spec_accepted_tokens"]
    for rid, report in reports.items():
        assert report.num_steps == len(tokens[rid]) - 1 - report.num_accepted
        assert report.num_accepted == sum(count * steps for count, steps in enumerate(report.histogram))


def test_an_engine_without_drafts_reports_none(checkpoint):
    engine = Engine(checkpoint)
    engine.start("a", [1, 2])
    assert [item.speculation.num_drafts for item in engine.run() if item.finish is not None] == [0]
    assert not any(name.startswith("spec_") for name in (*engine.scheduler.counters, *engine.scheduler.gauges))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_samples_of_trees_accept_the_drawn_number(count):
    drafts = {0: Drafts((9, 8, 7, 6, 5), (-1, -1, 0, 1, 2)), 2: Drafts((0, 1, 2))}
    step = SimpleNamespace(drafts=drafts, reqs=[SimpleNamespace(rid=str(i)) for i in range(3)],
                           starts=np.zeros(3, np.int64), num_samples=np.array([6, 1, 4]))
    for model_s in ([9, 8, 7, 6, 5, 5, 3, 0, 1, 2, 2], [8] * 11, [0] * 11, list(range(11))):
        tokens = torch.tensor(model_s)
        simulated = SimulatedSamples(SimpleNamespace(count=lambda rids, starts, most: np.minimum(count, most)))
        sample = simulated.replace(step, Sample(tokens, SampledTokens(tokens, None)))
        counts, _ = accept(sample.token_ids(), [6, 1, 4], drafts)
        assert counts == [count + 1, 1, count + 1]
        assert sample.token_ids()[6] == model_s[6]
