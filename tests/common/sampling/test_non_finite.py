"""--enable-nan-detection: requests whose logits are not finite fail, alone, and in every kind of step."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from baton.common.api.errors import NON_FINITE_LOGITS, from_code
from baton.common.api.messages import Failed
from baton.common.api.sampling import SamplingParams
from baton.common.layers.vocab import VocabTable
from baton.common.request.sampling_metadata import NOT_FINITE, SamplingMetadata
from baton.common.sampling.sampler import Sampler
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, algorithm_flags, questions, replace_sampling
from baton.tests.helpers.chains_on_cpu import chains_on_cpu
from baton.tests.helpers.flag_engine import FlagEngine, Question, run
from baton.tests.helpers.outputs import outputs_of

ON = "--enable-nan-detection"


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=1)],
                         ids=["greedy", "seeded"])
@pytest.mark.parametrize("with_argmax", [False, True])
def test_rows_that_are_not_finite_are_marked(sampling, with_argmax):
    logits = torch.randn(6, 50)
    logits[1, 7] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, 4] = float("-inf")  # a token that the model masks
    logits[4] = float("-inf")
    logits[5, 0], logits[5, 1] = float("inf"), float("nan")
    rows = [SamplingMetadata(sampling, 9)] * 6
    argmax = logits.argmax(-1) if with_argmax and sampling.greedy else None
    marked = [row for row, token in enumerate(Sampler(50, "cpu", 0, checks_finite=True).launch(
        logits.clone(), rows, argmax=argmax).token_ids()) if token == NOT_FINITE]
    assert marked == [1, 2, 4, 5]
    sample = Sampler(50, "cpu", 0, checks_finite=True).launch(logits.clone(), rows, argmax=argmax)
    assert int(sample.tokens.min()) >= 0 and int(sample.tokens.max()) < 50  # the next step computes on them
    assert NOT_FINITE not in Sampler(50, "cpu", 0).launch(logits[[0, 3]], rows[:2]).token_ids()


@contextmanager
def poisoned(token: int):
    """The hidden states of this token are NaN wherever it is computed."""
    embed = VocabTable.embed

    def with_nan(self, ids):
        found = embed(self, ids).clone()
        found[ids == token] = float("nan")
        return found

    with patch.object(VocabTable, "embed", with_nan):
        yield


def told(engine: FlagEngine, asked: list[Question]) -> tuple[dict[int, list[int]], dict[int, Failed]]:
    """The tokens of requests, and those that failed."""
    for number, question in enumerate(asked):
        engine.start(str(number), question)
    run(engine)
    engine.assert_clean()
    tokens: dict[int, list[int]] = {}
    for output in outputs_of(engine.sent):
        tokens.setdefault(int(output.rid), []).extend(output.token_ids)
    return tokens, {int(message.rid): message for message in engine.sent if isinstance(message, Failed)}


ASKED = questions(12)
SAMPLED = [Question(each.prompt, replace_sampling(each.sampling, temperature=0.8, seed=i))
           for i, each in enumerate(ASKED)]
EXTRAS = [Question(each.prompt, replace_sampling(each.sampling, frequency_penalty=0.1)) for each in ASKED]


@pytest.mark.parametrize(("asked", "flags", "chains"), [
    (ASKED, (), False), pytest.param(SAMPLED, (), False, marks=pytest.mark.slow), (EXTRAS, (), False),
    (ASKED, algorithm_flags("NGRAM"), False), (ASKED, algorithm_flags("EAGLE3"), True),
    (SAMPLED, algorithm_flags("EAGLE3"), True),
    pytest.param(EXTRAS, algorithm_flags("EAGLE3"), True, marks=pytest.mark.slow)],
    ids=["greedy", "seeded", "extras", "drafts", "chains", "seeded chains", "chains with extras"])
def test_only_their_requests_fail(asked, flags, chains):
    """A token that some answers contain spoils all that comes after it; the other answers are as ever."""
    with ExitStack() as stack:
        steps = stack.enter_context(chains_on_cpu()) if chains else None
        plain, failed = told(FlagEngine(*BASE, *ROOMY, *flags), asked)
        assert not failed
        prompts = {token for question in asked for token in question.prompt}
        counts = {token: [number for number, tokens in plain.items() if token in tokens[:-1]]
                  for tokens in plain.values() for token in tokens[1:-1] if token not in prompts}
        bad = min(counts, key=lambda token: abs(len(counts[token]) - 3))
        with poisoned(bad):
            engine = FlagEngine(*BASE, *ROOMY, *flags, ON)
            tokens, failed = told(engine, asked)
        # A draft that is rejected has spoiled the rows of its step, too.
        assert failed.keys() == {*counts[bad]} or flags and failed.keys() > {*counts[bad]}
        assert len(failed) < len(asked)
        for number, message in failed.items():
            error = from_code(message.code, message.message)
            assert (error.status, error.type, error.code) == (500, "server_error", NON_FINITE_LOGITS)
            end = plain[number].index(bad) if bad in plain[number] else len(tokens[number])
            before = plain[number][:end + 1]
            # Where the token is a draft, rows before it in its step read its values with weight 0, and are NaN too.
            assert tokens[number] == before[:len(tokens[number])] and len(tokens[number]) >= len(before) - 6
        assert {number: tokens[number] for number in plain if number not in failed} == {
            number: plain[number] for number in plain if number not in failed}
        assert engine.tracker.counters["non_finite_requests"] == len(failed)
        assert steps is None or steps


def test_a_prompt_that_is_not_finite_fails_with_its_first_token():
    bad = next(token for token in ASKED[0].prompt if token not in ASKED[1].prompt)
    with poisoned(bad):
        asked = [ASKED[0], ASKED[1]]
        tokens, failed = told(FlagEngine(*BASE, *ROOMY, ON), asked)
    assert failed.keys() == {0} and tokens.keys() == {1}
