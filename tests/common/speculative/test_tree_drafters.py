"""Draft models that draft trees: tokens are those without, and candidates follow their own paths."""

from __future__ import annotations

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import SpeculativeArgs
from baton.common.speculative import draft_tree
from baton.tests.common.speculative.test_drafting_engine import answers
from baton.tests.helpers.deepseek_models import save_with_predictors
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.hand_driven import Engine, tokens_of


def trees(folder, algorithm: str, topk: int = 3, steps: int = 4, rows: int = 9) -> SpeculativeArgs:
    return SpeculativeArgs(speculative_algorithm=algorithm, speculative_draft_model_path=folder and str(folder),
                           speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=rows)


OPTIONS = [{}, {"overlap": True, "page_size": 16}, {"page_size": 1, "chunk": 7},
           {"max_total_tokens": 128, "chunk": 20}, {"chunk": 9, "schedule": {"enable_mixed_chunk": True}}]


@pytest.mark.parametrize(("algorithm", "options"), [
    *(("EAGLE3", options) for options in OPTIONS), *(("STANDALONE", options) for options in OPTIONS),
    ("EAGLE", OPTIONS[2])], ids=str)
def test_tokens_equal_those_without_drafts(models, undrafted, algorithm, options):
    engine, found = answers(models / "model", speculative=trees(models / algorithm, algorithm), **options)
    assert found == undrafted
    assert engine.drafting.num_drafted > 100


def test_latent_layers_with_experts(tmp_path):
    """DeepSeek's own layer repeats tokens, so that some drafts are accepted."""
    save_with_predictors(tmp_path, 1, echo=3.0, eos_token_id=None)
    expected = answers(tmp_path)[1]
    engine, found = answers(tmp_path, speculative=trees(None, "NEXTN"), chunk=7)
    assert found == expected and engine.drafting.num_accepted > 0


def test_several_layers_draft_chains(tmp_path):
    save_with_predictors(tmp_path, 2)
    with pytest.raises(ConfigError, match="leave --speculative-eagle-topk out"):
        Engine(tmp_path, speculative=trees(None, "NEXTN"))


def test_paths_are_no_longer_than_a_window(tmp_path):
    save_gpt_oss(tmp_path, sliding_window=4)
    with pytest.raises(ConfigError, match="fewer than 4 drafts"):
        Engine(tmp_path, speculative=trees(tmp_path, "STANDALONE"))
    Engine(tmp_path, speculative=trees(tmp_path, "STANDALONE", steps=3))


@pytest.mark.parametrize("topk,steps,rows", [(2, 3, 7), (4, 2, 20)])
def test_a_model_drafts_its_own_answers(models, topk, steps, rows):
    """The draft model is the model itself: most steps accept a path of all passes, greedy or sampled."""
    model = models / "model"
    engine = Engine(model, speculative=trees(model, "STANDALONE", topk, steps, rows))
    for i in range(6):
        engine.start(str(i), [3 + i] * (5 + i), max_new_tokens=1 + 4 * (steps + 1),
                     **({"temperature": 1.0, "seed": i} if i % 2 else {}))
    found = tokens_of(engine.run())
    plain = Engine(model)
    for i in range(6):
        plain.start(str(i), [3 + i] * (5 + i), max_new_tokens=1 + 4 * (steps + 1),
                    **({"temperature": 1.0, "seed": i} if i % 2 else {}))
    assert found == tokens_of(plain.run())
    assert engine.drafting.num_accepted >= 6 * (4 * steps - 2 * steps)


def test_candidates_follow_their_own_paths(models, monkeypatch):
    """Every candidate's probability is the model's after the prompt and its path, though siblings' rows are computed
    beside it."""
    seen, add = [], draft_tree.DraftTrees.add

    def noticed(self, chosen, tokens, logprobs):
        frontier = add(self, chosen, tokens, logprobs)
        seen.append((len(self._passes), tokens.clone(), logprobs.clone(), frontier))
        return frontier

    monkeypatch.setattr(draft_tree.DraftTrees, "add", noticed)
    model, prompt = models / "model", [5, 9, 2, 7, 7, 1]
    engine = Engine(model, speculative=trees(model, "STANDALONE", 3, 3, 20))
    engine.start("0", prompt, max_new_tokens=30)
    engine.scheduler.step(0.0)
    engine.scheduler.synchronize()
    levels = seen[:3]
    first = next(iter(engine.tracker.live.values())).tokens.view().tolist()[len(prompt)]
    paths = [()]
    for number, tokens, logprobs, frontier in levels:
        for row, path in enumerate(paths):
            want = alone(model, [*prompt, first, *path])
            for token, logprob in zip(tokens[row].tolist(), logprobs[row].tolist()):
                assert abs(want[token] - logprob) < 1e-3, (number, path, token)
        paths = [(*paths[parent], token) for parent, token in zip(frontier.parents[0].tolist(),
                                                                  frontier.tokens[0].tolist())]


def alone(model, tokens):
    """The log-probabilities of the model's best next tokens."""
    engine = Engine(model)
    engine.start("0", tokens, max_new_tokens=1, logprobs={"return_logprob": True, "top_logprobs_num": 20})
    (output,) = [item for item in engine.run() if item.logprobs]
    return dict(output.logprobs.top[0])
