"""Logit processors, hidden states and prompts of embeddings through the whole engine, stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.common.api.errors import InvalidRequest
from baton.common.api.messages import CustomProcessor, Failed, Generate
from baton.common.api.sampling import SamplingParams
from baton.common.request.logit_processors import load
from baton.common.scheduler.request_tracker import RequestTracker
from baton.common.serving.native.extras import embedded_prompts
from baton.common.serving.protocol.row_extras import custom_processor, state_lists
from baton.tests.helpers.hand_driven import Engine, tokens_of

VOCAB, HIDDEN, LENGTH = 96, 64, 16
HERE = "baton.tests.helpers.row_processors"
DISALLOWED = "baton.common.sampling.builtin_processors:DisallowedTokens"
BUDGET = "baton.common.sampling.builtin_processors:ThinkingBudget"
SCHEDULES = [{}, {"overlap": True}, {"overlap": True, "chunk": 7, "page_size": 1},
             {"max_total_tokens": 100, "chunk": 20}, {"max_total_tokens": 100, "overlap": True}]
schedules = pytest.mark.parametrize("options", SCHEDULES, ids=str)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3))
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in (30, 9, 25)]


def retracts(engine, options):
    return bool(engine.scheduler.batcher.retraction.num_retracted) == ("max_total_tokens" in options)


def processed(path, **params):
    return {"fields": {"processor": CustomProcessor(path, params)}, "max_new_tokens": LENGTH}


def failures(engine):
    return {message.rid: message for message in engine.sent if isinstance(message, Failed)}


# ---------------------------------------------------------------- processors


@schedules
def test_processors_act_on_the_rows_that_ask(checkpoint, prompts, options):
    plain = Engine(checkpoint[0])
    banned = {name: list(range(i, VOCAB, 3)) for i, name in enumerate("abc")}
    for (name, tokens), prompt in zip(banned.items(), prompts):
        plain.start(name, prompt, max_new_tokens=LENGTH, logit_bias=dict.fromkeys(tokens, -100.0))
    plain.start("plain", prompts[0], max_new_tokens=LENGTH)
    expected = tokens_of(plain.run())

    engine = Engine(checkpoint[0], **options)
    for (name, tokens), prompt in zip(banned.items(), prompts):
        engine.start(name, prompt, **processed(DISALLOWED, token_ids=tokens))
    engine.start("plain", prompts[0], max_new_tokens=LENGTH)
    assert tokens_of(engine.run()) == expected
    assert retracts(engine, options)


def test_order_with_bias_penalties_and_logprobs(checkpoint, prompts):
    """The processor sees what bias has made, and log-probabilities are those of what it makes."""
    engine = Engine(checkpoint[0])
    engine.start("flipped", prompts[1], logit_bias={5: -100.0}, logprobs={"return_logprob": True},
                 temperature=1.0, top_k=1, **processed(f"{HERE}:flip"))
    outputs = engine.run()
    assert tokens_of(outputs) == {"flipped": [5] * LENGTH}
    assert all(value > -1e-3 for item in outputs if item.logprobs for value in item.logprobs.values)


@pytest.mark.parametrize("overlap", [False, True])
def test_processors_are_told_all_tokens_and_keep_their_parameters(checkpoint, prompts, overlap, tmp_path):
    engine = Engine(checkpoint[0], overlap=overlap)
    engine.start("a", prompts[1], **processed(f"{HERE}:Remembers", file=str(tmp_path / "seen")))
    answer = tokens_of(engine.run())["a"]
    lines = (tmp_path / "seen").read_text().splitlines()[:LENGTH]
    assert lines == [f"{i + 1};{prompts[1]};{answer[:i]}" for i in range(LENGTH)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_processor_fails_the_requests_concerned(checkpoint, prompts, overlap):
    engine = Engine(checkpoint[0], overlap=overlap)
    engine.start("fails", prompts[0], logprobs={"return_logprob": True}, **processed(f"{HERE}:fails_late", fails=True))
    engine.start("goes on", prompts[0], **processed(f"{HERE}:fails_late"))
    engine.start("narrow", prompts[1], **processed(f"{HERE}:narrows"))
    engine.start("none", prompts[1], **processed(f"{HERE}:answers_nothing"))
    engine.start("plain", prompts[1], max_new_tokens=LENGTH)
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
    told = {rid: (message.code, message.message) for rid, message in failures(engine).items()}
    found = tokens_of(engine.run())
    instead = "in place of logits of shape [1, 96]"
    reasons = {"fails": ("fails_late", "RuntimeError: as asked"),
               "narrow": ("narrows", f"TypeError: it returned a tensor of shape [1, 5] {instead}"),
               "none": ("answers_nothing", f"TypeError: it returned a NoneType {instead}")}
    assert told == {rid: ("invalid_request", f"custom_logit_processor '{HERE}:{name}' failed: {why}.")
                    for rid, (name, why) in reasons.items()}
    assert found["fails"] == [7, 7, 7] and found["goes on"] == [7] * LENGTH
    assert "narrow" not in found and len(found["plain"]) == LENGTH


@pytest.mark.parametrize("start", [None, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_thinking_budget(checkpoint, prompts, start, overlap):
    engine = Engine(checkpoint[0], overlap=overlap)
    free = [i for i in range(VOCAB) if i not in (2, 4)]
    told = {"thinking_budget": 5, "end_token_id": 2, "new_line_token_id": 4}
    if start is not None:
        told["start_token_id"] = start
    ban = {2: -100.0, 4: -100.0}  # never by themselves, but where the budget is spent
    engine.start("thinks", [7, 3, 8, 9] if start else [8, 9], logit_bias=ban, **processed(BUDGET, **told))
    engine.start("does not", [8, 9, 10], logit_bias=ban, **processed(BUDGET, **{**told, "start_token_id": 95}))
    found = tokens_of(engine.run())
    before = 3 if start else 5  # two tokens of the prompt stand behind the block's beginning
    thought = found["thinks"]
    assert thought[before:before + 2] == [4, 2]
    assert all(token in free for token in thought[:before] + thought[before + 2:])
    if 95 not in found["does not"]:
        assert 2 not in found["does not"]


def test_a_processors_earlier_import_path_names_the_same_one():
    earlier = DISALLOWED.replace("sampling.builtin_processors", "engine.logit_processors")
    assert type(load(earlier)) is type(load(DISALLOWED))


@pytest.mark.parametrize("path,why", [
    (f"{HERE}:missing", "AttributeError"), ("baton.no_such_module:Name", "ModuleNotFoundError"),
    (f"{HERE}:NeedsArguments", "TypeError"), (f"{HERE}:number", "no callable"),
    ("json.that:Name", "ModuleNotFoundError"), ("baton.tests.helpers.exits_when_imported:Name", "SystemExit"),
])
def test_what_cannot_be_imported_is_refused_and_the_engine_goes_on(checkpoint, prompts, path, why):
    engine = Engine(checkpoint[0])
    assert engine.start("a", prompts[0], **processed(path)) is None
    assert failures(engine)["a"].code == "invalid_request"
    with pytest.raises(InvalidRequest, match=why):
        load(path)
    engine.start("b", prompts[0])
    assert len(tokens_of(engine.run())["b"]) == 12


@pytest.mark.parametrize("given", [
    "no_colon", "a:b:c", "a.b:", ":c", "../x:y", "a b:c", "a:" + "b" * 600])
def test_processors_are_import_paths(given):
    with pytest.raises(InvalidRequest, match="import path"):
        custom_processor(given, None)
    assert custom_processor("a.b_1:C.d", {"x": 1}) == CustomProcessor("a.b_1:C.d", {"x": 1})
    assert custom_processor("", {"x": 1}) is None


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("decodes", [False, True])
def test_a_prompt_may_fill_the_memory_where_nothing_follows(decodes):
    tracker = RequestTracker([].append, eos_ids=frozenset(), vocab_size=1 << 31, max_request_tokens=8,
                             max_requests=9, timeout=1.0, reserves_output=decodes)
    accepted = [tracker.accept(Generate(f"{n}, {more}", [1] * n, SamplingParams(max_new_tokens=more)), 0.0) is not None
                for n, more in ((8, 0), (8, 1), (9, 0), (7, 1), (7, 2))]
    assert accepted == [True, False, False, True, not decodes]


# ---------------------------------------------------------------- hidden states


def states_of(outputs, rid):
    return np.frombuffer(b"".join(item.hidden_states or b"" for item in outputs if item.rid == rid),
                         "<f4").reshape(-1, HIDDEN)


@schedules
def test_hidden_states_equal_transformers(checkpoint, prompts, options):
    folder, model = checkpoint
    engine = Engine(folder, **options)
    for _ in range(2):  # the second time, the prefix cache has all prompts
        for i, prompt in enumerate(prompts):
            engine.start(f"{i}", prompt, max_new_tokens=LENGTH, fields={"return_hidden_states": True})
        engine.start("plain", prompts[0], max_new_tokens=LENGTH)
        engine.start("prompt only", prompts[1], max_new_tokens=0, fields={"return_hidden_states": True})
        outputs = engine.run()
        found = tokens_of(outputs)
        for i, prompt in enumerate(prompts):
            tokens = prompt + found[f"{i}"][:-1]
            with torch.no_grad():
                expected = model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
            np.testing.assert_allclose(states_of(outputs, f"{i}"), expected, atol=2e-4)
        assert not len(states_of(outputs, "plain"))
        with torch.no_grad():
            expected = model.model(torch.tensor([prompts[1]])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(states_of(outputs, "prompt only"), expected, atol=2e-4)
    assert retracts(engine, options)


def test_the_shape_that_clients_get():
    states = np.arange(20, dtype="<f4").reshape(5, 4)
    assert state_lists(states.tobytes(), 3, 4) == [states[:3].tolist(), states[3].tolist(), states[4].tolist()]


# ---------------------------------------------------------------- embeddings


@schedules
def test_embeddings_equal_transformers(checkpoint, prompts, options):
    folder, model = checkpoint
    torch.manual_seed(3)
    table = model.get_input_embeddings()
    embeds = [table(torch.tensor(prompt)) + 0.3 * torch.randn(len(prompt), HIDDEN) for prompt in prompts]
    given = [one.detach().numpy().astype("<f4").tobytes() for one in embeds]
    expected = {}
    for i, one in enumerate(embeds):
        told = model.generate(inputs_embeds=one[None], max_new_tokens=LENGTH, do_sample=False)
        expected[f"{i}"] = told[0].tolist()
        told = model.generate(inputs_embeds=one[None], max_new_tokens=LENGTH, do_sample=False, repetition_penalty=1.5)
        expected[f"{i} penalized"] = told[0].tolist()
    engine = Engine(folder, **options)
    for i, one in enumerate(given):
        fields = {"input_embeds": one}
        zeros = [0] * len(prompts[i])
        engine.start(f"{i}", zeros, max_new_tokens=LENGTH, fields=fields)
        engine.start(f"{i} penalized", zeros, max_new_tokens=LENGTH, repetition_penalty=1.5, fields=fields)
    outputs = engine.run()
    assert tokens_of(outputs) == expected
    assert not any(item.num_cached_tokens for item in outputs)
    assert engine.cache.num_cached == 0
    assert retracts(engine, options)


def test_pages_of_embeddings_and_of_tokens_never_meet(checkpoint):
    """Neither takes what the other stored, though the ids that stand for embeddings are a prompt, too."""
    folder, model = checkpoint
    zeros = [0] * 20
    rows = np.random.default_rng(1).normal(size=(20, HIDDEN)).astype("<f4").tobytes()
    alone = Engine(folder)
    alone.start("embeds", zeros, fields={"input_embeds": rows})
    expected = tokens_of(alone.run())["embeds"]
    engine = Engine(folder)
    for rid in ("first", "second"):
        engine.start(f"ids {rid}", zeros)
        engine.start(f"embeds {rid}", zeros, fields={"input_embeds": rows})
        outputs = engine.run()
        found = tokens_of(outputs)
        assert found[f"embeds {rid}"] == expected != found[f"ids {rid}"]
        cached = {item.rid: item.num_cached_tokens for item in outputs}
        assert cached == {f"ids {rid}": 0 if rid == "first" else 16, f"embeds {rid}": 0}


def test_an_answer_to_embeddings_that_another_server_began(checkpoint, prompts):
    folder, _ = checkpoint
    rows = np.random.default_rng(1).normal(size=(20, HIDDEN)).astype("<f4").tobytes()
    engine = Engine(folder)
    engine.start("whole", [0] * 20, fields={"input_embeds": rows}, repetition_penalty=1.3)
    whole = tokens_of(engine.run())["whole"]
    engine.start("rest", [0] * 20 + whole[:5], fields={"input_embeds": rows}, logprobs={"num_answered": 5},
                 repetition_penalty=1.3, max_new_tokens=7)
    assert tokens_of(engine.run())["rest"] == whole[5:]


def test_embeddings_in_other_shapes_are_refused():
    told = embedded_prompts([[1, 2.5], [3, 4]], 2)
    assert (told.counts, told.batched) == ([2], False)
    assert np.frombuffer(told.rows[0], "<f4").tolist() == [1, 2.5, 3, 4]
    assert embedded_prompts([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], 2).counts == [1, 2]
    for wrong in ([], [[]], [[[]]], [[1.0]], [[1.0, 2.0], [3.0]], [[[1.0, 2.0]], [3.0, 4.0]], [[[1.0, 2.0]], []],
                  [[1.0, 1e300]], [[[1.0, 2.0, 3.0]]]):
        with pytest.raises(InvalidRequest, match="input_embeds"):
            embedded_prompts(wrong, 2)
