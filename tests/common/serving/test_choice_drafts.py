"""A choice whose steps give several tokens: ends by stop strings, and the counts of drafts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from baton.common.api.messages import Finish, Generate, Logprobs, Output, OutputExtras, PromptUsage
from baton.common.api.sampling import SamplingParams
from baton.common.obs.metrics import ServerMetrics
from baton.common.serving.context.draft_counts import DraftCounts
from baton.common.serving.context.generation import Choice, usage_of
from baton.common.tokenizer.text_stream import TextStream

HIDDEN = 3


def make_choice(metrics=None, drafts=None, continued=(), **sampling):
    params = SamplingParams(**sampling)
    request = Generate("r", [ord("?"), *continued], params)
    stream = TextStream(lambda token: bytes([token]), frozenset(), params)
    metrics = metrics or ServerMetrics("m", "null", speculates=True)
    choice = Choice(0, request, stream, metrics, time.monotonic(), drafts)
    if continued:
        choice.resume_after(continued)
    return choice


def outputs_of(runs, finish=None, width=3):
    """The engine's outputs, of ``runs`` in steps with ``width`` drafts; the first one is the prompt's token."""
    for index, run in enumerate(runs):
        tokens = [ord(char) for char in run]
        rows = np.full((len(tokens) + (not index), HIDDEN), index, "<f4")
        extras = OutputExtras(None if index else PromptUsage(1, 0), finish if index == len(runs) - 1 else None,
                              Logprobs(tokens, [-1.0] * len(tokens), [[(token, -1.0)] for token in tokens]),
                              hidden_states=rows.tobytes())
        yield Output("r", tokens, extras, width if index and run else 0)


def answer(choice, runs, finish=None):
    for output in outputs_of(runs, finish):
        choice.take(output)
        if choice.finish is not None:
            break
    return (choice.text, choice.token_ids, choice.finish, choice.num_output_tokens, choice.logprobs,
            len(b"".join(choice.hidden_states)))


TEXTS = [("abcSTOPdef", {"stop": ("STOP",)}), ("abcSTOPdef", {"stop": ("STOP",), "no_stop_trim": True}),
         ("ab12cd345e", {"stop_regex": (r"\d{3}",)}), ("abcST", {"stop": ("STOP",)}), ("aé€STOPx", {"stop": ("STOP",)})]


@pytest.mark.parametrize(("text", "sampling"), TEXTS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_an_answer_ends_at_the_token_that_completes_a_stop_string_wherever_it_is_in_a_run(text, sampling, width):
    tokens = text.encode().decode("latin-1")
    runs = [tokens[:1], *(tokens[i:i + width] for i in range(1, len(tokens), width))]
    assert answer(make_choice(**sampling), runs, Finish("length")) == answer(make_choice(**sampling), list(tokens),
                                                                             Finish("length"))


def test_an_answer_that_ends_by_a_stop_string_has_the_counts_of_its_drafts():
    metrics = ServerMetrics("m", "null", speculates=True)
    choice = make_choice(metrics, DraftCounts(), stop=("STOP",))
    answer(choice, ["a", "bcS", "T", "OPde", "never"])
    report = choice.speculation
    assert choice.finish.matched == "STOP" and choice.num_output_tokens == 7
    assert (report.num_steps, report.num_drafts, report.num_accepted) == (3, 9, 3)
    assert report.histogram == [1, 1, 1] and report.accept_length == 7 / 3
    details = usage_of([choice], 1, report_cached=False).completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 6)
    assert b"baton:spec_verify_calls_total" in metrics.render(None)
    assert 'spec_verify_calls_total{mode="null",model_name="m"} 3.0' in metrics.render(None).decode()


def test_a_cancelled_choice_and_a_continued_one_count_what_this_server_did():
    choice = make_choice(drafts=DraftCounts(simulated=True))
    answer(choice, ["a", "bc", ""], Finish("abort"))
    assert choice.speculation.num_steps == 1 and choice.speculation.simulated
    continued = make_choice(drafts=DraftCounts(), continued=[ord("x")] * 10)
    answer(continued, ["a", "bc", "def"], Finish("length"))
    assert continued.num_output_tokens == 16
    assert continued.speculation.num_steps == 2 and continued.speculation.accept_length == 3


def test_a_server_without_drafts_reports_none():
    choice = make_choice()
    answer(choice, ["a", "b"], Finish("length"))
    assert choice.speculation is None
