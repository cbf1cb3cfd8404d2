"""A prefill and a decode scheduler in one process, over a real transfer backend: equal tokens, no page left."""

import asyncio
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.common.api.errors import Aborted
from baton.common.api.messages import Bootstrap, CustomProcessor, Failed, Generate
from baton.common.api.namespace import Namespace
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import (
    CacheArgs,
    DisaggregationArgs,
    HttpArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
    TierArgs,
)
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.distributed.parallel import Parallel
from baton.common.engine.rank import EngineParts
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.execution.draft_pass import DraftPass
from baton.common.execution.executor import Executor
from baton.common.kvcache.manager import KVCacheManager
from baton.common.models.registry import load_model_spec
from baton.common.runner.model_runner import ModelRunner
from baton.common.sampling.sampler import Sampler
from baton.common.scheduler.make_batcher import make_batcher
from baton.common.scheduler.request_tracker import RequestTracker
from baton.decode.rank import _make_scheduler as make_decode
from baton.kvtransfer.bootstrap import BootstrapServer
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.helpers import dict_tier  # noqa: F401 (registers its tiers)
from baton.tests.helpers.outputs import outputs_of
from baton.tests.helpers.ports import free_port
from baton.tests.helpers.tiers import in_host

VOCAB = 96


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3,
    )).save_pretrained(folder)
    return folder


@contextmanager
def bootstrap_server():
    """Yields the port of a bootstrap server of its own."""
    port, loop, started = free_port(), asyncio.new_event_loop(), threading.Event()

    async def serve(stop):
        async with BootstrapServer("127.0.0.1", port):
            started.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(stop),))
    thread.start()
    assert started.wait(10)
    yield port
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


@pytest.fixture(scope="module")
def bootstrap_port():
    with bootstrap_server() as port:
        yield port


class OverlappedParts(EngineParts):
    overlap = True


class Side:
    """One server's engine, stepped by hand."""

    def __init__(self, folder, make, mode, port, backend, *, chunk=8192, max_total_tokens=2048, groups=2,
                 overlap=False, cache=None, schedule=None, speculative=None, page_size=4,
                 tiers=None):
        """``cache``, ``schedule``: further fields of CacheArgs and ScheduleArgs. ``speculative``: an algorithm.
        ``tiers``: fields of TierArgs."""
        config = ServerConfig(
            ModelArgs(model_path=str(folder)),
            CacheArgs(page_size=page_size, max_total_tokens=max_total_tokens, num_layer_groups=groups, **(cache or {})),
            ScheduleArgs(**{"chunked_prefill_size": chunk, "schedule_conservativeness": 0.0} | (schedule or {})),
            ParallelArgs(), KernelArgs(),
            DisaggregationArgs(disaggregation_mode=mode, disaggregation_transfer_backend=backend,
                               disaggregation_bootstrap_port=port), HttpArgs(),
            speculative=SpeculativeArgs(speculative), tiers=TierArgs(**tiers or {}))
        spec = load_model_spec(config.model)
        runner = ModelRunner.load(config, spec, Parallel(), "cpu", lambda what, share: None)
        self.cache = KVCacheManager(runner.num_pages, page_size, groups=runner.new_cache_groups(),
                                    lookahead=runner.lookahead)
        self.sent = []
        self.tracker = RequestTracker(self.sent.append, eos_ids=frozenset(), vocab_size=spec.vocab_size,
                                      max_request_tokens=max_total_tokens, max_requests=512, timeout=1e9,
                                      reserves_output=mode != "prefill")
        batcher = make_batcher(config, runner, self.cache, Parallel().attn_tp)
        self.drafter, draft_pass = runner.drafter, None
        if runner.drafter is not None:
            draft_pass = DraftPass(runner.drafter, runner.draft_model.features, Parallel().attn_tp)
        executor = Executor(runner, Sampler(spec.vocab_size, "cpu", 0), draft_pass=draft_pass)
        parts = EngineParts(config, Parallel(), runner, batcher, executor, self.tracker)
        if overlap:  # what a GPU would choose; here the step is over when it was launched, but its results come late
            parts = OverlappedParts(**vars(parts))
        self.scheduler = make(parts)

    def start(self, rid, prompt, **options):
        """``fields``: further ones of Generate."""
        options = {"max_new_tokens": 12, "room": None, "port": None, "fields": {}} | options
        params = SamplingParams(temperature=0.0, max_new_tokens=options["max_new_tokens"])
        meet = Bootstrap("127.0.0.1", options["port"], options["room"]) if options["room"] is not None else None
        req = self.tracker.accept(Generate(rid, list(prompt), params, bootstrap=meet, **options["fields"]), now=0.0)
        if req is not None:
            self.scheduler.add(req)
        return req

    def take(self):
        self.tracker.flush()
        outputs = outputs_of(self.sent)
        failures = {message.rid: message for message in self.sent if isinstance(message, Failed)}
        self.sent.clear()
        return outputs, failures

    def abort(self, req):
        error = Aborted("The request was aborted.")
        self.scheduler.synchronize()
        self.scheduler.abort(req, error)
        self.tracker.fail(req, error)

    def assert_clean(self):
        self.cache.check_integrity()
        assert self.scheduler.idle and not self.tracker.live and self.cache.num_allocated == 0


def run(*sides, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not all(side.scheduler.idle for side in sides):
        assert time.monotonic() < deadline, [side.scheduler.transfers.__dict__ for side in sides]
        worked = [side.scheduler.step(0.0) for side in sides]
        if not any(worked):
            time.sleep(0.001)


def tokens_of(outputs):
    found = {}
    for item in outputs:
        found.setdefault(item.rid, []).extend(item.token_ids)
    return found


@pytest.fixture(scope="module", params=["fake", "nixl", "nixl, overlap", "ipc, overlap"])
def pair(request, checkpoint, bootstrap_port):
    backend, _, overlap = request.param.partition(", ")
    common = {"port": bootstrap_port, "backend": backend, "overlap": bool(overlap)}
    prefill = Side(checkpoint, make_prefill, "prefill", chunk=23, **common)
    decode = Side(checkpoint, make_decode, "decode", max_total_tokens=640, **common)
    prefill.start_at = decode.start_at = bootstrap_port
    yield prefill, decode
    prefill.scheduler.close()
    decode.scheduler.close()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 90, 14)]


@pytest.fixture(scope="module")
def unified(checkpoint):
    def make(parts):
        return UnifiedScheduler(parts.batcher, parts.executor, parts.tracker, overlap=False)

    return Side(checkpoint, make, "null", 0, "fake")


@pytest.fixture(scope="module")
def expected(unified, prompts):
    side = unified
    for i, prompt in enumerate(prompts):
        side.start(str(i), prompt)
    run(side)
    return tokens_of(side.take()[0])


def test_disaggregated_tokens_equal_unified(pair, prompts, expected):
    prefill, decode = pair
    for attempt in range(2):  # the second time over both prefix caches
        sent_before = prefill.scheduler.sender.counters["kv_bytes_sent"]
        for i, prompt in enumerate(prompts):
            room = 1000 * attempt + i
            for side in pair:
                side.start(str(i), prompt, room=room, port=prefill.start_at)
        run(prefill, decode)
        outputs, failures = decode.take()
        assert not failures
        assert tokens_of(outputs) == expected
        halves, failures = prefill.take()
        assert not failures
        assert {item.rid: item.token_ids[0] for item in halves} == {rid: ids[0] for rid, ids in expected.items()}
        prefill.assert_clean()
        decode.assert_clean()
        moved = prefill.scheduler.sender.counters["kv_bytes_sent"] - sent_before
        assert moved > 0
    retracted = decode.scheduler.unified.batcher.retraction.num_retracted
    assert retracted > 0, "the decode pool was meant to be too small for all"


def test_only_missing_pages_travel(pair):
    prefill, decode = pair
    prompt = [(7 * i) % VOCAB for i in range(81)]
    sent = []
    page_bytes = decode.scheduler.receiver.info.layout.page_bytes
    for attempt in range(2):
        before = prefill.scheduler.sender.counters["kv_bytes_sent"]
        prefill.start("a", prompt, room=5000 + attempt, port=prefill.start_at, max_new_tokens=2)
        decode.start("a", prompt, room=5000 + attempt, port=prefill.start_at, max_new_tokens=2)
        run(prefill, decode)
        sent.append((prefill.scheduler.sender.counters["kv_bytes_sent"] - before) / page_bytes)
        outputs, _ = decode.take()
        prefill.take()
    assert sent == [21, 1]
    assert outputs[-1].num_cached_tokens == 80


def test_namespaces_share_nothing_on_either_side(pair):
    """Equal prompts under two salts travel whole; the second of a salt finds all full pages on both sides."""
    prefill, decode = pair
    prompt = [(11 * i + 3) % VOCAB for i in range(41)]
    page_bytes = decode.scheduler.receiver.info.layout.page_bytes
    sent, cached, tokens = [], [], []
    for room, salt in enumerate(("", "a", "b", "a", ""), start=6000):
        before = prefill.scheduler.sender.counters["kv_bytes_sent"]
        for side in pair:
            side.start("a", prompt, room=room, port=prefill.start_at, max_new_tokens=2,
                       fields={"namespace": Namespace(salt)})
        run(prefill, decode)
        sent.append((prefill.scheduler.sender.counters["kv_bytes_sent"] - before) / page_bytes)
        outputs, failures = decode.take()
        cached.append((prefill.take()[0][-1].num_cached_tokens, outputs[-1].num_cached_tokens))
        tokens.append(tokens_of(outputs)["a"])
        assert not failures
        prefill.assert_clean()
        decode.assert_clean()
    assert sent == [11, 11, 11, 1, 1] and cached == [(0, 0)] * 3 + [(40, 40)] * 2
    assert tokens == tokens[:1] * 5


def test_different_namespaces_fail_both_halves(pair):
    """The body of one half lost its salt on the way."""
    prefill, decode = pair
    prefill.start("n", [1, 2, 3], room=8500, port=prefill.start_at, fields={"namespace": Namespace("a")})
    decode.start("n", [1, 2, 3], room=8500, port=prefill.start_at)
    run(prefill, decode)
    for side in pair:
        outputs, failures = side.take()
        assert not outputs and failures["n"].code == "kv_transfer_failed"
        side.assert_clean()


def test_abort_on_either_side_ends_both(pair, prompts):
    prefill, decode = pair
    for room, victim in enumerate((prefill, decode), start=7000):
        reqs = {side: side.start("x", prompts[0] * 2, room=room, port=prefill.start_at) for side in pair}
        for _ in range(3):
            prefill.scheduler.step(0.0)
            decode.scheduler.step(0.0)
            time.sleep(0.002)
        victim.abort(reqs[victim])
        run(prefill, decode)
        for side in pair:
            side.take()
            side.assert_clean()


def test_different_prompts_fail_both_halves(pair):
    prefill, decode = pair
    prefill.start("d", [1, 2, 3], room=8000, port=prefill.start_at)
    decode.start("d", [1, 2, 4], room=8000, port=prefill.start_at)
    run(prefill, decode)
    for side in pair:
        _, failures = side.take()
        assert failures["d"].code == "kv_transfer_failed"
        side.assert_clean()


@pytest.mark.parametrize("fields", [
    {"prompt": [1, VOCAB]}, {"prompt": [2**31]}, {"prompt": [-1]}, {"sampling": {"stop_token_ids": (VOCAB,)}},
    {"sampling": {"logit_bias": {VOCAB: 1.0}}}, {"fields": {"token_ids_logprob": [VOCAB], "return_logprob": True}}])
def test_an_engine_refuses_ids_beyond_its_vocabulary_alone(unified, prompts, expected, fields):
    """Whatever its API server lets through."""
    unified.start("0", prompts[0])
    prompt = fields.get("prompt", [1, 2])
    sampling = SamplingParams(temperature=0.0, max_new_tokens=2, **fields.get("sampling", {}))
    assert unified.tracker.accept(Generate("bad", prompt, sampling, **fields.get("fields", {})), now=0.0) is None
    run(unified)
    outputs, failures = unified.take()
    assert failures["bad"].code == "invalid_request" and str(VOCAB - 1) in failures["bad"].message
    assert tokens_of(outputs) == {"0": expected["0"]}
    unified.assert_clean()


def test_decode_refuses_a_first_token_that_it_does_not_have(pair, prompts, monkeypatch):
    prefill, decode = pair
    result = decode.scheduler.receiver.result
    monkeypatch.setattr(decode.scheduler.receiver, "result",
                        lambda room: msgspec.structs.replace(result(room), token_id=VOCAB))
    for side in pair:
        side.start("v", prompts[0], room=8300, port=prefill.start_at)
    run(prefill, decode)
    outputs, failures = decode.take()
    assert not outputs and failures["v"].code == "kv_transfer_failed" and str(VOCAB) in failures["v"].message
    prefill.take()
    for side in pair:
        side.assert_clean()


def test_decode_alone_prefills_itself(pair, prompts, expected):
    _, decode = pair
    decode.start("3", prompts[3])
    run(decode)
    assert tokens_of(decode.take()[0])["3"] == expected["3"]
    decode.assert_clean()


def embedded(length, seed=0):
    """Fields of a request whose prompt is ``length`` rows of embeddings."""
    rows = np.random.default_rng([seed, length]).normal(size=(length, 64)).astype("<f4")
    return {"input_embeds": rows.tobytes()}


def states_of(outputs, rid):
    return np.frombuffer(b"".join(item.hidden_states or b"" for item in outputs if item.rid == rid), "<f4")


def test_embeddings_hidden_states_and_processors(pair, unified, prompts):
    """Each alone and together; decode's pool is too small for all, so that it computes some prompts again."""
    prefill, decode = pair
    banned = CustomProcessor("baton.common.sampling.builtin_processors:DisallowedTokens",
                             {"token_ids": [*range(0, 96, 5)]})
    retracted = decode.scheduler.unified.batcher.retraction.num_retracted
    requests = []
    for i, prompt in enumerate(prompts):
        fields = {} if i % 4 == 0 else embedded(len(prompt))
        fields |= {"processor": banned} if i % 3 else {}
        fields["return_hidden_states"] = i % 5 > 0
        requests.append((str(i), prompt if i % 4 == 0 else [0] * len(prompt), fields))
    for rid, prompt, fields in requests:
        unified.start(rid, prompt, fields=fields)
        for side in pair:
            side.start(rid, prompt, room=9000 + int(rid), port=prefill.start_at, fields=fields)
    run(unified)
    run(prefill, decode)
    (outputs, failures), (expected, _) = decode.take(), unified.take()
    assert not failures and tokens_of(outputs) == tokens_of(expected)
    assert decode.scheduler.unified.batcher.retraction.num_retracted > retracted
    for rid, prompt, fields in requests:
        wanted = states_of(expected, rid)
        assert len(wanted) == (64 * (len(prompt) + 11) if fields["return_hidden_states"] else 0)
        np.testing.assert_allclose(states_of(outputs, rid), wanted, atol=2e-4)
    prefill.take()
    prefill.assert_clean()
    decode.assert_clean()


def test_different_embeddings_fail_both_halves(pair):
    prefill, decode = pair
    for seed, side in enumerate(pair):
        side.start("d", [0] * 5, room=8100, port=prefill.start_at, fields=embedded(5, seed))
    run(prefill, decode)
    for side in pair:
        _, failures = side.take()
        assert failures["d"].code == "kv_transfer_failed"
        side.assert_clean()


@pytest.mark.parametrize("late", [False, True])
def test_a_processor_that_fails_ends_both_halves(pair, prompts, late):
    """In prefill, which chooses the first token, or in decode."""
    prefill, decode = pair
    name = "fails_late" if late else "narrows"
    processor = CustomProcessor(f"baton.tests.helpers.row_processors:{name}", {"fails": True})
    for side in pair:
        side.start("p", prompts[0], room=8200 + late, port=prefill.start_at, fields={"processor": processor})
    run(prefill, decode)
    outputs, failures = decode.take()
    assert failures["p"].code == "invalid_request" and name in failures["p"].message
    assert tokens_of(outputs).get("p", []) == ([7, 7, 7] if late else [])
    assert ("p" in prefill.take()[1]) is not late
    prefill.assert_clean()
    decode.assert_clean()


@pytest.mark.parametrize("tier", ["dict", "slow-dict"])
@pytest.mark.parametrize("backend", ["fake", "ipc"])
def test_both_sides_load_evicted_prefixes_from_tiers(checkpoint, bootstrap_port, prompts, expected, backend, tier):
    """Pools for a fifth of the prompts: the second time all full pages come from tiers, and decode receives none."""
    common = {"port": bootstrap_port, "backend": backend, "tiers": in_host(0.01, tier), "max_total_tokens": 160}
    pair = (Side(checkpoint, make_prefill, "prefill", chunk=23, **common),
            Side(checkpoint, make_decode, "decode", **common))
    prefill, decode = pair
    page_bytes = decode.scheduler.receiver.info.layout.page_bytes
    for attempt in range(2):
        before = prefill.scheduler.sender.counters["kv_bytes_sent"]
        loaded = [side.scheduler.batcher.loads.num_loaded for side in pair]
        for i, prompt in enumerate(prompts):
            for side in pair:
                side.start(str(i), prompt, room=9000 + 100 * attempt + i, port=bootstrap_port)
        run(*pair)
        outputs, failures = decode.take()
        assert not failures and tokens_of(outputs) == expected
        prefill.take()
        for side in pair:
            side.assert_clean()
    full_pages, all_pages = sum(len(p) // 4 for p in prompts), sum(-(-len(p) // 4) for p in prompts)
    sent = (prefill.scheduler.sender.counters["kv_bytes_sent"] - before) / page_bytes
    assert sent == all_pages - full_pages
    assert all(side.scheduler.batcher.loads.num_loaded - was > full_pages // 2 for side, was in zip(pair, loaded))
    assert decode.scheduler.batcher.retraction.num_retracted > 0, "decode's pool was meant to be too small for all"
    for side in pair:
        side.scheduler.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_request_aborted_while_it_loads_ends_on_both_sides(checkpoint, bootstrap_port, victim):
    common = {"port": bootstrap_port, "backend": "fake", "tiers": in_host(0.01, "slow-dict")}
    pair = (Side(checkpoint, make_prefill, "prefill", **common), Side(checkpoint, make_decode, "decode", **common))
    prompt = [(7 * i) % VOCAB for i in range(50)]
    for attempt in range(2):
        reqs = [side.start("a", prompt, room=9500 + attempt, port=bootstrap_port) for side in pair]
        if attempt:
            side = pair[victim]
            while reqs[victim] not in side.scheduler.batcher.queues.loading:
                for each in pair:
                    each.scheduler.step(0.0)
            side.abort(reqs[victim])
            assert len(side.scheduler.batcher.loads) == 1
        run(*pair)
        answers = [side.take() for side in pair]
        for side in pair:
            side.assert_clean()
            side.cache._evict(side.cache.num_cached)
    assert [set(failures) for _, failures in answers] == [{"a"}, {"a"}]
    for side in pair:
        side.scheduler.close()
