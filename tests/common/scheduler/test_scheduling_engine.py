"""Under every schedule a request gets the tokens that it gets alone, and all pages are freed."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.common.api.errors import Aborted
from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.api.messages import Failed
from baton.common.config.server.schedule import SCHEDULE_POLICIES
from baton.common.scheduler.preemption.copy_rates import PrefillRate
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.outputs import outputs_of

VOCAB = 96
WIDTH = 48
EOS = 95
VOCABULARY = Vocabulary([bytes([32 + i]) for i in range(95)] + [b"<end>"], [EOS], [EOS])
GRAMMARS = [GrammarSpec("regex", "[a-f]{3,12}"), GrammarSpec("regex", "(ab|cd)+e")]
STEMS = [[7 * i % 90 for i in range(n)] for n in (24, 40)]
HOST = {"retract_host_memory_gb": 0.001}
PREEMPT = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=EOS, initializer_range=0.3,
    )).save_pretrained(folder)
    return folder


def make_requests(seed, count):
    """``(rid, prompt, options of Engine.start)``: greedy and sampled, penalties, grammars, logprobs, priorities."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = rng.choice([[], *STEMS]) + [rng.randrange(90) for _ in range(rng.randrange(1, 30))]
        options = {"max_new_tokens": rng.choice([1, 12, 24, 40]), "ignore_eos": rng.random() < 0.8,
                   "fields": {"priority": rng.choice([None, 0, 5, 20])}, "logprobs": {}}
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice([0.6, 1.2]), "seed": rng.randrange(2**40)}
        if rng.random() < 0.3:
            options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.3}
        elif rng.random() < 0.3:
            options["grammar"] = rng.choice(GRAMMARS)
        kind = rng.random()
        if kind < 0.1:
            options["fields"]["return_hidden_states"] = True
        elif kind < 0.2:
            rows = np.random.default_rng(len(prompt)).normal(size=(len(prompt), WIDTH)).astype("<f4")
            options["fields"]["input_embeds"] = rows.tobytes()
        elif kind < 0.45:
            options["logprobs"] = {"return_logprob": True, "logprob_start_len": rng.randrange(len(prompt))}
        yield str(i), prompt, options


@dataclass(eq=False)
class Took:
    """Result of a request. Equal where the tokens are, and the other numbers nearly."""

    tokens: list[int]
    reason: str
    prompt_logprobs: list[float]
    hidden_states: list[float]  # the first of each position

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Took) and (self.tokens, self.reason) == (other.tokens, other.reason) and all(
            len(mine) == len(theirs) and np.allclose(mine, theirs, atol=1e-3) for mine, theirs in (
                (self.prompt_logprobs, other.prompt_logprobs), (self.hidden_states, other.hidden_states)))


def took(items):
    """The result of each request that has ended."""
    tokens = tokens_of(items)
    ended = {item.rid: item.finish.reason for item in items if item.finish is not None}
    logprobs = {item.rid: item.prompt_logprobs.values for item in items if item.prompt_logprobs is not None}
    states = dict.fromkeys(ended, b"")
    for item in items:
        if item.rid in ended:
            states[item.rid] += item.hidden_states or b""
    return {rid: Took(tokens.get(rid, []), reason, [value or 0.0 for value in logprobs.get(rid, [])],
                      np.frombuffer(states[rid], "<f4").reshape(-1, WIDTH)[:, 0].tolist())
            for rid, reason in ended.items()}


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Results of requests that run alone, by their descriptions."""
    engine, known = Engine(checkpoint, vocabulary=VOCABULARY), {}

    def answer(rid, prompt, options):
        key = repr((prompt, options))
        if key not in known:
            engine.start(rid, prompt, **options)
            known[key] = took(engine.run())[rid]
        return known[key]

    return answer


def always_swap(engine):
    """Pretend that host memory costs nothing, so that retracted requests are always swapped out."""
    engine.scheduler.batcher.rates._link_bandwidth = 1e18
    return engine


def drive(engine, requests, seed, *, abort_share=0.0):
    """Start the requests in bursts between steps, abort some at any stage. Returns all outputs and the aborted ids."""
    rng = random.Random(seed)
    queue, live, aborted = list(requests), {}, set()
    while queue or not engine.scheduler.idle:
        for _ in range(min(len(queue), rng.choice([0, 0, 1, 4]))):
            rid, prompt, options = queue.pop(0)
            live[rid] = engine.start(rid, prompt, **options)
        engine.scheduler.step(0.0)
        engine.tracker.flush()
        batcher = engine.scheduler.batcher
        assert len(batcher.running) + len(batcher.prefilling) <= batcher.args.max_running_requests
        if rng.random() < abort_share and engine.tracker.live:
            engine.scheduler.synchronize()
            if engine.tracker.live:
                req = engine.tracker.live[rng.choice(sorted(engine.tracker.live))]
                engine.scheduler.abort(req, Aborted("the client left"))
                engine.tracker.fail(req, Aborted("the client left"))
                aborted.add(req.rid)
    engine.tracker.flush()
    failed = [message.rid for message in engine.sent if isinstance(message, Failed)]
    assert sorted(failed) == sorted(aborted), "each aborted request fails once, and no other one does"
    messages = outputs_of(engine.sent)
    ended = [item.rid for item in messages if item.finish is not None]
    assert len(ended) == len(set(ended)) and not aborted & set(ended)
    engine.run()  # checks that no page is allocated
    return messages, aborted


def check(checkpoint, alone, options, *, seed, count, abort_share=0.0, swaps=False):
    engine = Engine(checkpoint, vocabulary=VOCABULARY, **options)
    if swaps:
        always_swap(engine)
    requests = list(make_requests(seed, count))
    messages, aborted = drive(engine, requests, seed, abort_share=abort_share)
    actual, partly = took(messages), tokens_of(messages)
    for rid, prompt, given in requests:
        expected = alone(rid, prompt, given)
        if rid in aborted:
            assert partly.get(rid, []) == expected.tokens[:len(partly.get(rid, []))]
        else:
            assert actual[rid] == expected, (rid, given)
    return engine.scheduler.batcher


SOAKS = [
    {"policy": "fcfs"},
    {"policy": "lpm", "overlap": True, "max_total_tokens": 160, "schedule": HOST | PREEMPT},
    {"policy": "dfs-weight", "chunk": 16, "max_total_tokens": 160, "schedule": {"enable_mixed_chunk": True}},
    {"policy": "lof", "overlap": True, "chunk": 16, "max_total_tokens": 160,
     "schedule": {"enable_mixed_chunk": True} | HOST | PREEMPT},
    {"policy": "random", "chunk": -1, "overlap": True, "max_total_tokens": 160, "max_running": 5,
     "schedule": {"max_prefill_tokens": 40} | PREEMPT},
    {"policy": "fcfs", "overlap": True, "page_size": 1, "max_total_tokens": 128, "radix": False,
     "schedule": {"schedule_conservativeness": 1.0} | HOST | PREEMPT},
]


@pytest.mark.parametrize("options", SOAKS, ids=lambda options: options["policy"])
def test_tokens_do_not_depend_on_the_schedule(checkpoint, alone, options):
    swaps = "retract_host_memory_gb" in options.get("schedule", {})
    batcher = check(checkpoint, alone, options, seed=4, count=30, abort_share=0.03, swaps=swaps)
    small = "max_total_tokens" in options
    assert (batcher.retraction.num_retracted > 0) == small, "a small pool is meant to see retractions"
    assert not swaps or batcher.swap.num_swapped_out == batcher.retraction.num_retracted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", SCHEDULE_POLICIES.names)
def test_long_soak(checkpoint, alone, policy, seed):
    rng = random.Random(seed)
    schedule = {"schedule_conservativeness": rng.choice([0.0, 0.0, 1.0]), "enable_mixed_chunk": rng.random() < 0.5}
    schedule |= rng.choice([{}, HOST]) | rng.choice([{}, PREEMPT])
    options = {"policy": policy, "overlap": rng.random() < 0.5, "page_size": rng.choice([1, 4, 16]),
               "chunk": rng.choice([-1, 7, 32, 512]), "max_running": rng.choice([3, 8, 64]),
               "max_total_tokens": rng.choice([160, 256, 2048]), "schedule": schedule}
    check(checkpoint, alone, options, seed=100 + seed, count=120, abort_share=0.04,
          swaps="retract_host_memory_gb" in schedule)


# ---------------------------------------------------------------- mixed steps


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_get_a_token_in_every_mixed_step(checkpoint, alone, overlap):
    engine = Engine(checkpoint, chunk=8, overlap=overlap, schedule={"enable_mixed_chunk": True})
    options = {"max_new_tokens": 24, "ignore_eos": True}
    running = engine.start("running", [3] * 5, **options)
    engine.scheduler.step(0.0)
    engine.scheduler.step(0.0)
    prompt = STEMS[1] + [1]
    engine.start("prompt", prompt, **options)
    lengths = []
    for _ in range(5):  # 41 tokens and one decode row: 7 a step
        engine.scheduler.step(0.0)
        lengths.append(running.length)
        assert engine.scheduler.batcher.prefilling
    assert np.diff(lengths).tolist() == [1] * 4
    actual = took(engine.run())
    assert actual["prompt"] == alone("prompt", prompt, {"logprobs": {}, "fields": {}} | options)
    assert actual["running"] == alone("running", [3] * 5, {"logprobs": {}, "fields": {}} | options)


# ---------------------------------------------------------------- preemption


CHOICES = [{}, {"temperature": 1.0, "seed": 11}, {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
           {"grammar": GRAMMARS[1], "temperature": 1.3, "seed": 5}]


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_lose_nothing(checkpoint, alone, overlap, host):
    """Four requests fill all slots; urgent ones take three of them."""
    engine = Engine(checkpoint, overlap=overlap, max_running=4, vocabulary=VOCABULARY,
                    schedule=PREEMPT | (HOST if host else {}))
    if host:
        always_swap(engine)
    low = [(f"low {i}", STEMS[i % 2] + [i], {"max_new_tokens": 24, "logprobs": {}, "fields": {"priority": 0}} | choice)
           for i, choice in enumerate(CHOICES)]
    for rid, prompt, options in low:
        engine.start(rid, prompt, **options)
    for _ in range(3):
        engine.scheduler.step(0.0)
    urgent = [(f"urgent {i}", [i] * 9,
               {"max_new_tokens": 6, "logprobs": {}, "fields": {"priority": 1}, "ignore_eos": True}) for i in range(3)]
    for rid, prompt, options in urgent:
        engine.start(rid, prompt, **options)
    items = engine.run()
    actual = took(items)
    for rid, prompt, options in low + urgent:
        assert actual[rid] == alone(rid, prompt, options)
    batcher = engine.scheduler.batcher
    assert 1 <= batcher.retraction.num_preempted <= 3
    assert (batcher.swap.num_swapped_out if host else 0) == (batcher.retraction.num_retracted if host else 0)
    order = [item.rid for item in items if item.finish is not None]
    assert sorted(order[-batcher.retraction.num_preempted:])[0].startswith("low"), "preempted requests end last"
    cached = {item.rid: item.num_cached_tokens for item in items}
    assert max(cached[rid] for rid, _, _ in low) <= 40, "its own pages, matched again, are no cache hit"


def test_a_prompt_preempted_between_chunks_keeps_its_logprobs(checkpoint, alone):
    """Pages that another request leaves in the cache meanwhile do not hide positions that are still to be reported."""
    prompt = STEMS[1] + [5]
    options = {"max_new_tokens": 3, "logprobs": {"return_logprob": True, "logprob_start_len": 0},
               "fields": {"priority": 0}}
    for host in (False, True):
        engine = Engine(checkpoint, chunk=8, max_running=1, schedule=PREEMPT | (HOST if host else {}))
        if host:
            always_swap(engine)
        engine.start("asks", prompt, **options)
        engine.scheduler.step(0.0)
        engine.start("same", prompt, max_new_tokens=2, fields={"priority": 1})
        actual = took(engine.run())
        assert engine.scheduler.batcher.retraction.num_preempted == 1
        assert actual["asks"] == alone("asks", prompt, options) and len(actual["asks"].prompt_logprobs) == len(prompt)


# ---------------------------------------------------------------- host memory


def fill_and_retract(checkpoint, **options):
    engine = Engine(checkpoint, max_total_tokens=160, schedule=HOST, **options)
    requests = [(str(i), [i] * 20, {"max_new_tokens": 24, "ignore_eos": True, "logprobs": {}, "fields": {}})
                for i in range(6)]
    for rid, prompt, given in requests:
        engine.start(rid, prompt, **given)
    return engine, requests


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_are_swapped_in_from_host_memory(checkpoint, alone, overlap):
    engine, requests = fill_and_retract(checkpoint, overlap=overlap, radix=False)
    always_swap(engine)
    computed = []
    launch = engine.scheduler._pipeline._executor.launch
    engine.scheduler._pipeline._executor.launch = lambda step, *rest: (
        computed.append(step.num_tokens if step.num_prefill else 0), launch(step, *rest))[1]
    actual = took(engine.run())
    batcher = engine.scheduler.batcher
    assert batcher.retraction.num_retracted == batcher.swap.num_swapped_out > 0
    assert sum(computed) == 6 * 20, "no prompt was computed twice, without a prefix cache too"
    for rid, prompt, given in requests:
        assert actual[rid] == alone(rid, prompt, given)


def test_pages_cheaper_to_recompute_are_not_swapped_out(checkpoint):
    engine, _ = fill_and_retract(checkpoint)
    swap = engine.scheduler.batcher.swap
    engine.scheduler.batcher.rates._link_bandwidth = 1.0
    engine.run()
    assert engine.scheduler.batcher.retraction.num_retracted > 0 and swap.num_swapped_out == 0
    assert engine.scheduler.batcher.rates.prefill > 0


def test_full_host_memory_does_no_harm(checkpoint, alone):
    engine, requests = fill_and_retract(checkpoint, radix=False)
    swap = always_swap(engine).scheduler.batcher.swap
    others = [b"%d" % page for page in range(swap.tiers[0].capacity - 12)]  # leaves pages for one request, not for two
    swap.tiers[0].store(others, np.zeros(len(others), np.int64))
    while engine.scheduler.step(0.0):
        engine.tracker.flush()
    assert engine.scheduler.batcher.retraction.num_retracted > swap.num_swapped_out > 0
    swap.tiers[0].free(others)
    actual = took(engine.run())
    assert all(actual[rid] == alone(rid, prompt, given) for rid, prompt, given in requests)


def test_requests_aborted_while_swapped_out_leave_nothing(checkpoint):
    engine, _ = fill_and_retract(checkpoint, overlap=True)
    batcher = always_swap(engine).scheduler.batcher
    while not any(req.swapped_out for req in batcher.waiting):
        assert engine.scheduler.step(0.0)
    assert batcher.swap.num_pages > 0
    engine.scheduler.synchronize()
    for req in [req for req in batcher.waiting if req.swapped_out]:
        engine.scheduler.abort(req, None)
        engine.tracker.drop(req)
    assert batcher.swap.num_pages == 0
    engine.run()


def test_the_prefill_rate_counts_a_step_from_the_end_of_the_one_before():
    times = iter([0.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    rate = PrefillRate(clock=lambda: next(times))
    rate.begin(100)  # at 0
    rate.begin(400)  # at 1, after the first
    rate.end()  # at 2
    assert rate.tokens_per_second == 50
    rate.end()  # at 4: 400 tokens in 2 s
    assert rate.tokens_per_second == pytest.approx(0.8 * 50 + 0.2 * 200)
    rate.begin(0)  # a decode step is not measured
    rate.end()
    assert rate.tokens_per_second == pytest.approx(80)
