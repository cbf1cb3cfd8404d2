"""A draft model's pages and drafts through a prefill and a decode scheduler in one process: every slot is right.

The drafters are those of hash_drafter.py, which compare all slots that a step may read with what belongs there.
"""

import contextlib

import msgspec
import pytest

from baton.common.api.drafts import Drafts
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers.hash_drafter import HashDrafter
from baton.tests.helpers.tiers import in_host
from baton.tests.integration.transfer.test_relay_in_process import (  # noqa: F401 (fixtures)
    VOCAB,
    Side,
    bootstrap_port,
    checkpoint,
    expected,
    prompts,
    run,
    tokens_of,
    unified,
)


@pytest.fixture
def make_pair(checkpoint, bootstrap_port, monkeypatch, expected):  # noqa: F811
    """Makes a prefill and a decode side; options of one alone are in ``prefill`` and ``decode``."""
    monkeypatch.setattr(HashDrafter, "answers", expected)
    with contextlib.ExitStack() as stack:
        def make(backend="fake", prefill=None, decode=None, **common):
            common |= {"port": bootstrap_port, "backend": backend}
            pair = (Side(checkpoint, make_prefill, "prefill", **{"chunk": 23, **common, **(prefill or {})}),
                    Side(checkpoint, make_decode, "decode", **{**common, **(decode or {})}))
            for side in pair:
                stack.callback(side.scheduler.close)
            return pair

        yield make


rooms = iter(range(20_000, 30_000))


def ask(pair, prompts, port, **options):  # noqa: F811
    """Runs all requests; returns decode's outputs, and the bytes that travelled."""
    prefill, decode = pair
    before = prefill.scheduler.sender.counters["kv_bytes_sent"]
    for name, prompt in prompts.items():
        room = next(rooms)
        for side in pair:
            side.start(name, prompt, room=room, port=port, **options)
    run(*pair)
    outputs, failures = decode.take()
    assert not failures and not prefill.take()[1]
    for side in pair:
        side.assert_clean()
    return outputs, prefill.scheduler.sender.counters["kv_bytes_sent"] - before


def page_bytes(side):
    info = side.scheduler.receiver.info
    return info.layout.page_bytes + (0 if info.draft is None else info.draft.layout.page_bytes)


def numbered(prompts):  # noqa: F811
    return {str(i): prompt for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("algorithm", ["HASH", "PLAIN_HASH"])
@pytest.mark.parametrize("backend, options", [
    ("nixl", {}), ("ipc", {"overlap": True}), ("fake", {"decode": {"max_total_tokens": 480}}),
    ("fake", {"decode": {"max_total_tokens": 480, "schedule": {"retract_host_memory_gb": 0.01}}}),
    ("ipc", {"prefill": {"page_size": 8}, "decode": {"page_size": 4}}),
    ("fake", {"prefill": {"page_size": 4}, "decode": {"page_size": 16}}),
    ("ipc", {"tiers": in_host(0.01, "slow-dict"), "max_total_tokens": 192}),
    ("fake", {"decode": {"schedule": {"enable_mixed_chunk": True}, "max_total_tokens": 480}})], ids=str)
def test_disaggregated_tokens_equal_unified(make_pair, prompts, expected, bootstrap_port, algorithm,  # noqa: F811
                                            backend, options):
    pair = prefill, decode = make_pair(backend, **options, speculative=algorithm)
    for _ in range(2):  # the second time over both prefix caches
        outputs, _ = ask(pair, numbered(prompts), bootstrap_port)
        assert tokens_of(outputs) == expected
    batcher = decode.scheduler.batcher
    assert decode.drafter.checked > 1000 and batcher.drafting.num_accepted > 100
    if not batcher.retraction.num_retracted:
        assert not decode.drafter.prompts, "decode computed a prompt for its draft model"
    assert batcher.swap is None or batcher.swap.num_swapped_out > 0
    computed = {name for name, _, _ in prefill.drafter.prompts}
    assert computed == set(expected)


@pytest.mark.parametrize("prefix", [0, 8])
def test_the_first_step_verifies_the_drafts_that_came(make_pair, prompts, expected, bootstrap_port,  # noqa: F811
                                                      prefix):
    """Prefill generates the first token and drafts three; decode's only step accepts them and adds a token."""
    pair = prefill, decode = make_pair(speculative="HASH")
    prefill.drafter.errs = False
    drafting = decode.scheduler.batcher.drafting
    named = numbered(prompts)
    ask(pair, {name: prompt[:prefix] for name, prompt in named.items() if len(prompt) > prefix > 0}, bootstrap_port,
        max_new_tokens=1)
    for number, (name, prompt) in enumerate(named.items(), 1):
        outputs, _ = ask(pair, {name: prompt}, bootstrap_port, max_new_tokens=5)
        assert tokens_of(outputs)[name] == expected[name][:5]
        assert (drafting.num_steps, drafting.num_accepted) == (number, 3 * number)


@pytest.mark.parametrize("algorithm, pages", [("HASH", [21, 1]), ("PLAIN_HASH", [21, 1])])
def test_only_missing_pages_travel(make_pair, bootstrap_port, algorithm, pages):  # noqa: F811
    pair = make_pair(speculative=algorithm)
    prompt = {"a": [(7 * i) % VOCAB for i in range(81)]}
    sent = [ask(pair, prompt, bootstrap_port, max_new_tokens=4) for _ in range(2)]
    assert [count / page_bytes(pair[1]) for _, count in sent] == pages
    assert sent[1][0][-1].num_cached_tokens == 80


def test_a_prompt_of_full_pages_sends_its_last_page_again(make_pair, bootstrap_port):  # noqa: F811
    """Nothing is known of the token after it, on which the draft's last slot depends."""
    pair = make_pair(speculative="HASH")
    prompt = {"a": [(5 * i) % VOCAB for i in range(40)]}
    sent = [ask(pair, prompt, bootstrap_port, max_new_tokens=4)[1] / page_bytes(pair[1]) for _ in range(2)]
    assert sent == [10, 1]


def test_a_conversation_reuses_its_answers(make_pair, bootstrap_port):  # noqa: F811
    pair = _, decode = make_pair(speculative="HASH")
    text = [(3 * i) % VOCAB for i in range(21)]
    for turn in range(3):
        outputs, sent = ask(pair, {"a": text}, bootstrap_port, max_new_tokens=10)
        assert turn == 0 or sent <= 3 * page_bytes(decode)
        assert outputs[0].num_cached_tokens >= 4 * ((len(text) - 3) // 4) - 4 or turn == 0
        text = text + tokens_of(outputs)["a"] + [turn, turn + 1, turn + 2]


@pytest.mark.parametrize("backend", ["ipc", "fake"])
def test_decode_alone_may_have_a_draft_model_of_its_own(make_pair, prompts, expected, bootstrap_port, backend):  # noqa: F811
    """It computes each prompt by it, but for what its prefix cache has, in chunks."""
    pair = prefill, decode = make_pair(backend, decode={"speculative": "PLAIN_HASH", "chunk": 16})
    assert prefill.drafter is None
    outputs, sent = ask(pair, numbered(prompts), bootstrap_port)
    assert tokens_of(outputs) == expected
    lengths = {name: len(prompt) for name, prompt in numbered(prompts).items()}
    computed = decode.drafter.prompts
    assert {name: max(stop for rid, _, stop in computed if rid == name) for name in lengths} == lengths
    assert max(stop - start for _, start, stop in computed) == 16
    decode.drafter.prompts = []
    outputs, _ = ask(pair, numbered(prompts), bootstrap_port)
    assert tokens_of(outputs) == expected
    assert {rid: start for rid, start, _ in decode.drafter.prompts} == {
        name: length // 4 * 4 for name, length in lengths.items() if length % 4}
    assert decode.scheduler.batcher.drafting.num_accepted > 100


def test_decode_without_drafts_ignores_them(make_pair, prompts, expected, bootstrap_port):  # noqa: F811
    pair = prefill, decode = make_pair(prefill={"speculative": "HASH"})
    outputs, sent = ask(pair, numbered(prompts), bootstrap_port)
    assert tokens_of(outputs) == expected and prefill.drafter.prompts
    assert sent == sum(-(-len(prompt) // 4) for prompt in prompts) * decode.scheduler.receiver.info.layout.page_bytes


def test_a_proposer_on_decode_needs_nothing_of_prefill(make_pair, prompts, expected, bootstrap_port):  # noqa: F811
    for prefill in (None, "HASH"):
        pair = make_pair(prefill={"speculative": prefill}, decode={"speculative": "NGRAM"})
        assert tokens_of(ask(pair, numbered(prompts), bootstrap_port)[0]) == expected
        assert pair[1].scheduler.batcher.drafting.num_drafted > 0


@pytest.mark.parametrize("prefill", [None, "PLAIN_HASH"])
def test_decode_that_needs_the_models_hidden_states_is_refused(make_pair, bootstrap_port, prefill):  # noqa: F811
    pair = make_pair(prefill={"speculative": prefill}, decode={"speculative": "HASH"})
    decode = pair[1]
    decode.start("a", [1, 2, 3], room=next(rooms), port=bootstrap_port)
    run(decode)
    failure = decode.take()[1]["a"]
    assert failure.code == "pair_mismatch" and "--speculative-algorithm" in failure.message


@pytest.mark.parametrize("drafts", [Drafts((VOCAB,)), Drafts((1, 2), (1, 0)), Drafts((-1,))], ids=str)
def test_drafts_that_are_none_are_dropped(make_pair, prompts, expected, bootstrap_port, drafts,  # noqa: F811
                                          monkeypatch):
    pair = _, decode = make_pair(speculative="HASH")
    result = decode.scheduler.receiver.result
    monkeypatch.setattr(decode.scheduler.receiver, "result",
                        lambda room: msgspec.structs.replace(result(room), drafts=drafts))
    assert tokens_of(ask(pair, numbered(prompts), bootstrap_port)[0]) == expected


def test_a_stream_continues_with_right_slots(make_pair, prompts, expected, bootstrap_port,  # noqa: F811
                                                     unified):  # noqa: F811
    """The router sends the prompt and the tokens that a server which died had sent."""
    pair = make_pair(speculative="HASH")
    for name, prompt in list(numbered(prompts).items())[:4]:
        answered = expected[name][:5]
        HashDrafter.answers = {name: expected[name][5:]}
        outputs, _ = ask(pair, {name: prompt + answered}, bootstrap_port, max_new_tokens=7,
                         fields={"num_answered": len(answered)})
        assert tokens_of(outputs)[name] == expected[name][5:]


def test_prefill_without_pages_for_drafts_sends_fewer(make_pair, prompts, expected, bootstrap_port):  # noqa: F811
    """Its pool is as large as the longest prompt: drafts have no pages of their own, and nothing waits for any."""
    longest = -(-max(map(len, prompts)) // 4) * 4
    pair = prefill, _ = make_pair(prefill={"max_total_tokens": longest}, speculative="HASH")
    assert tokens_of(ask(pair, numbered(prompts), bootstrap_port)[0]) == expected
    assert prefill.cache.num_pages == longest // 4


def test_urgent_requests_preempt_those_with_drafts(make_pair, prompts, expected, bootstrap_port):  # noqa: F811
    decoding = {"max_total_tokens": 240, "schedule": {"enable_priority_scheduling": True,
                                                      "retract_host_memory_gb": 0.01}}
    pair = prefill, decode = make_pair(speculative="HASH", schedule={"enable_priority_scheduling": True},
                                       decode=decoding)
    for name, prompt in numbered(prompts).items():
        room = next(rooms)
        for side in pair:
            side.start(name, prompt, room=room, port=bootstrap_port, fields={"priority": int(name) * 10})
        for side in pair:
            side.scheduler.step(0.0)
    run(*pair)
    outputs, failures = decode.take()
    assert not failures and tokens_of(outputs) == expected
    assert decode.scheduler.batcher.retraction.num_retracted > 0
    prefill.take()
    for side in pair:
        side.assert_clean()
