"""Acceptance parity: a verify step accepts what it would have accepted wherever else the tokens before it had been
computed. What a step should accept is computed beforehand, after each token of the answers, without any engine."""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from baton.common.api.sampling import SamplingParams
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.request.req import Req
from baton.common.speculative.ngram import OwnNgramProposer
from baton.common.tinychat import CHECKPOINT, DRAFT_MODELS
from baton.tests.helpers import speculative_reference as reference
from baton.tests.helpers.chains_on_cpu import ACTIVE
from baton.tests.helpers.flag_engine import Answer, FlagEngine, FlagPair, Question, Ran, bootstrap_server, run
from baton.tests.helpers.grammar_engine import schema_spec
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.tinychat.tasks import Example, held_out
from baton.tests.tinychat.tokenizer import render

ALGORITHMS = ("EAGLE3", "NEXTN", "NGRAM", "STANDALONE")
TREES = ("EAGLE3 tree", "NEXTN tree", "STANDALONE tree")
_DRAFT_MODELS = {"EAGLE3": "tinychat-eagle3", "NEXTN": "tinychat-nextn", "STANDALONE": "tinychat-draft"}
_TREE_FLAGS = ("--speculative-eagle-topk", "2", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "7")
TASKS = ("count", "reverse", "spell", "repeat", "recall", "json", "tools", "smalltalk", "mixed")
MAX_NEW_TOKENS = 48
PAGE_SIZE = 8
_ANEW_AT_ONCE = 32
BASE = ("--page-size", str(PAGE_SIZE), "--schedule-conservativeness", "0", "--random-seed", "3")
ROOMY = ("--max-total-tokens", "16384")
CHUNKS = ("--chunked-prefill-size", "52", "--max-running-requests", "4")
"""Chunks of prompts, and so few requests at once that a step has room for all their drafts."""

SCHEMAS = ({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"], "additionalProperties": False},
           {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5})


def algorithm_flags(algorithm: str) -> tuple[str, ...]:
    """The flags of an algorithm with tinychat's own draft model. NGRAM looks in a request's own tokens alone: what
    other requests have said depends on their order. A "tree" follows the names of ``TREES``."""
    algorithm, _, tree = algorithm.partition(" ")
    path = (("--speculative-draft-model-path", _DRAFT_MODELS[algorithm]) if algorithm in _DRAFT_MODELS
            else ("--speculative-ngram-capacity", "0"))
    return "--speculative-algorithm", algorithm, *path, *(_TREE_FLAGS if tree else ())


def num_drafts(algorithm: str) -> int:
    if algorithm in TREES:
        return int(_TREE_FLAGS[-1]) - 1
    return SpeculativeArgs(speculative_algorithm=algorithm,
                           speculative_draft_model_path=_DRAFT_MODELS.get(algorithm)).num_drafts


class Prompts:
    """tinychat's held-out questions as token ids."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer
        self._tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)

    def ids(self, example: Example) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(
            render(self._tokenizer, example, answered=False)).ids
        return ids


def questions(count: int, grammars: bool = False) -> list[Question]:
    """``count`` held-out questions whose answers are more than a few tokens; with ``grammars`` each must be answered by
    one of ``SCHEMAS``."""
    prompts = Prompts()
    ids = [prompts.ids(example) for example in held_out(count, seed=3, tasks=TASKS)]
    plain = SamplingParams(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS)
    if not grammars:
        return [Question(prompt, plain) for prompt in ids]
    specs = [schema_spec(schema) for schema in SCHEMAS]
    return [Question(prompt, replace_sampling(plain, grammar=specs[i % len(specs)])) for i, prompt in enumerate(ids)]


def replace_sampling(params: SamplingParams, **fields: object) -> SamplingParams:
    return msgspec.structs.replace(params, **fields)


# ---- what a step should accept

@cache
def _target() -> reference.Target:
    return reference.Target(CHECKPOINT, torch.float32)


@cache
def _drafter(algorithm: str) -> reference.Drafter:
    return reference.load_drafter(DRAFT_MODELS[_DRAFT_MODELS[algorithm]], _target())


@cache
def step_lengths(algorithm: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
    """See ``speculative_reference.step_lengths``; NGRAM's are those of its proposer alone."""
    drafts = num_drafts(algorithm)
    if algorithm in _DRAFT_MODELS:
        return reference.step_lengths(_target(), _drafter(algorithm), prompt, output, drafts)
    return _ngram_lengths(prompt, output, drafts)


def lengths_computed_anew(flags: Sequence[str], drafts: int, asked: Sequence[Question],
                          answers: Sequence[Answer]) -> list[dict[int, int]]:
    """What the verify steps of ``answers`` should accept, by the output tokens before them: as much as where all tokens
    before are computed by one prompt, by an engine with ``flags`` that drafts ``drafts`` tokens at most."""
    engine = FlagEngine(*BASE, *ROOMY, "--disable-radix-cache", *flags)
    places = [(index, known) for index, answer in enumerate(answers) for known, _, _ in answer.verified]
    found: list[dict[int, int]] = [{} for _ in answers]
    for begin in range(0, len(places), _ANEW_AT_ONCE):
        some = places[begin:begin + _ANEW_AT_ONCE]
        parts = [replace(asked[index], answered=answers[index].tokens[:known - 1], sampling=replace_sampling(
            asked[index].sampling, max_new_tokens=min(MAX_NEW_TOKENS - known + 1, drafts + 2)))
            for index, known in some]
        for (index, known), answer in zip(some, engine.answers(parts)):
            assert answer.verified[0][0] == known
            found[index][known] = answer.verified[0][2]
    return found


@dataclass(frozen=True)
class _Known:
    """As much of a request as a proposer reads."""

    tokens: Any
    rid: str = "known"


@dataclass(frozen=True)
class _View:
    values: np.ndarray

    def view(self) -> np.ndarray:
        return self.values


def _ngram_lengths(prompt: Sequence[int], output: Sequence[int], drafts: int) -> list[int]:
    proposer = OwnNgramProposer(SpeculativeArgs(speculative_algorithm="NGRAM"))
    tokens, lengths = np.array([*prompt, *output]), []
    for known in range(len(prompt) + 1, len(tokens)):
        limit = min(drafts, len(prompt) + MAX_NEW_TOKENS - known - 1)
        req: Any = _Known(_View(tokens[:known]))
        [found] = proposer.propose([req], [limit])
        proposed, length = () if found is None else found.tokens, 1
        while length <= len(proposed) and list(tokens[known + length - 1:known + length]) == [proposed[length - 1]]:
            length += 1
        lengths.append(min(length, len(tokens) - known))
    return lengths


# ---- scenarios: how an engine comes to answer

Scenario = Callable[[Sequence[str], Sequence[Question]], list[Answer]]
"""Answers questions with the flags of an algorithm; also with none, which is plain decoding."""


def unified(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return FlagEngine(*BASE, *ROOMY, *flags).answers(asked)


def chunked(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return FlagEngine(*BASE, *ROOMY, *CHUNKS, *flags).answers(asked)


def mixed_chunk(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return FlagEngine(*BASE, *ROOMY, *CHUNKS, "--enable-mixed-chunk", *flags).answers(asked)


def cached_prefix(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All prompts are in the prefix cache."""
    engine = FlagEngine(*BASE, *ROOMY, *flags)
    engine.answers(asked)
    return engine.answers(asked)


def after_retraction(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All requests are retracted in the midst of their answers, and computed again."""
    engine = FlagEngine(*BASE, *ROOMY, *flags)
    _retract(engine, [engine.start(str(number), question) for number, question in enumerate(asked)])
    return engine.finish(len(asked))


def after_swap(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All requests are retracted in the midst of their answers, and their pages kept in host memory."""
    engine = FlagEngine(*BASE, *ROOMY, "--retract-host-memory-gb", "0.05", *flags)
    swap, rates = engine.parts.batcher.swap, engine.parts.batcher.rates
    assert swap is not None and rates is not None
    rates._link_bandwidth = 1e18  # pretend that copies cost nothing, so that each retraction is one
    reqs = [engine.start(str(number), question) for number, question in enumerate(asked)]
    run(engine, until=lambda: max(req.num_output_tokens for req in reqs) > MAX_NEW_TOKENS // 8)
    engine.scheduler.synchronize()
    for req in reversed(engine.parts.batcher.running.copy()):
        engine.parts.batcher.retraction._retract(req)
    assert swap.num_swapped_out > 0, "no request was swapped out"
    return engine.finish(len(asked))


def _retract(engine: FlagEngine, reqs: Sequence[Req], *others: FlagEngine) -> None:
    """Runs until one of ``reqs`` has several output tokens, then retracts all."""
    run(engine, *others, until=lambda: max(req.num_output_tokens for req in reqs) > MAX_NEW_TOKENS // 8)
    engine.scheduler.synchronize()
    engine.parts.batcher.pause("retract")
    engine.parts.batcher.paused = None
    assert any(req.num_retractions and req.num_output_tokens > 1 for req in reqs), "no request was retracted"


def small_pool(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Requests are retracted for want of pages."""
    engine = FlagEngine(*BASE, "--max-total-tokens", str(_small_pool(asked)), *flags)
    answers = engine.answers(asked)
    assert engine.parts.batcher.retraction.num_retracted > 0, "no request was retracted"
    return answers


def _small_pool(asked: Sequence[Question]) -> int:
    """Room for the longest question, and less than the others need."""
    lengths = sorted(len(question.prompt) + MAX_NEW_TOKENS + 2 * PAGE_SIZE for question in asked)
    return max(lengths[-1], sum(lengths) // 8) // PAGE_SIZE * PAGE_SIZE


def continued(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Another server has sent the first third of each answer."""
    return _continued(FlagEngine(*BASE, *ROOMY, *flags).answers, asked)


def _continued(answers: Callable[[Sequence[Question]], list[Answer]], asked: Sequence[Question]) -> list[Answer]:
    begun = [answer.tokens[:len(answer.tokens) // 3] for answer in plain_answers(unified, asked)]
    rest = [replace(question, answered=tokens, sampling=replace_sampling(
        question.sampling, max_new_tokens=MAX_NEW_TOKENS - len(tokens))) for question, tokens in zip(asked, begun)]
    return [replace(answer, tokens=[*tokens, *answer.tokens]) for tokens, answer in zip(begun, answers(rest))]


def tensor_parallel(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Two ranks, each a process of its own; both decide the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asked"
        path.write_bytes(pickle.dumps(([*BASE, *ROOMY, *flags], asked, ACTIVE.get())))
        found = run_ranks(Path(__file__).with_name("parity_rank.py"), 2, Path(folder), str(path))
    assert found[0] == found[1]
    return [Answer(**{**answer, "steps": [Ran(**step) for step in answer["steps"]]}) for answer in found[0]]


def data_parallel(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Two attention groups of one rank each, with half of the questions each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asked"
        groups = ("--enable-dp-attention", "--dp-size", "2")
        path.write_bytes(pickle.dumps(([*BASE, *ROOMY, *groups, *flags], asked, ACTIVE.get())))
        found = run_ranks(Path(__file__).with_name("parity_rank.py"), 2, Path(folder), str(path))
    answers = [Answer(**{**answer, "steps": [Ran(**step) for step in answer["steps"]]})
               for group in found for answer in group]
    firsts = range(0, len(asked), 2)
    order = [*firsts, *range(1, len(asked), 2)]
    return [answers[order.index(number)] for number in range(len(asked))]


def host_tier(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All prompts are in host memory, to which the prefix cache has evicted them."""
    engine = FlagEngine(*BASE, *ROOMY, *_HOST_TIER, *flags)
    engine.answers(asked)
    engine.cache._evict(engine.cache.num_cached)
    assert not engine.cache.num_cached
    answers = engine.answers(asked)
    loads = engine.parts.batcher.loads
    assert loads is not None and loads.num_loaded > len(asked), "nothing was loaded from host memory"
    return answers


def storage(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All prompts are in a storage, where an engine that is gone has written them."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"storage_dir": folder, "min_free_space": 0, "use_direct_io": False, "prefetch_threshold": PAGE_SIZE,
                   "stall_seconds": 10}
        tiers = ("--enable-hierarchical-cache", "--hicache-size", "0.2", "--hicache-storage-backend", "file",
                 "--hicache-storage-prefetch-policy", "wait_complete",
                 "--hicache-storage-backend-extra-config", json.dumps(options))
        first = _engine_of_tiers(*tiers, *flags)
        first.answers(asked)
        first.cache._evict(first.cache.num_cached)
        first.cache.poll_tier()
        first.parts.batcher.loads.close()
        engine = _engine_of_tiers(*tiers, *flags)
        answers = engine.answers(asked)
        loads = engine.parts.batcher.loads
        assert loads.num_loaded_stored > len(asked), "nothing was loaded from the storage"
        loads.close()
        return answers


def pair_with_host_tier(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """All prompts are in the host memory of both engines."""
    with started_pair(_HOST_TIER, flags) as engines:
        engines.answers(asked)
        for engine in (engines.prefill, engines.decode):
            engine.cache._evict(engine.cache.num_cached)
        answers = engines.answers(asked)
        loaded = [engine.parts.batcher.loads.num_loaded for engine in (engines.prefill, engines.decode)]
        assert sum(loaded) > len(asked), f"nothing was loaded from host memory: {loaded}"
        return answers


def preempted(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """More urgent requests preempt others in the midst of their answers."""
    priorities = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0")
    engine = FlagEngine(*BASE, *ROOMY, *priorities, "--max-running-requests", str(max(1, len(asked) // 3)), *flags)
    urgent = {number: replace(question, fields={**question.fields, "priority": 5})
              for number, question in enumerate(asked) if number % 2}
    reqs = [engine.start(str(number), question) for number, question in enumerate(asked) if number not in urgent]
    run(engine, until=lambda: max(req.num_output_tokens for req in reqs) > MAX_NEW_TOKENS // 8)
    for number, question in urgent.items():
        engine.start(str(number), question)
    answers = engine.finish(len(asked))
    assert engine.parts.batcher.retraction.num_preempted > 0, "no request was preempted"
    return answers


def sampled(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return unified(flags, asked)


def pair_sampled(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return pair(flags, asked)


def two_choices(asked: Sequence[Question]) -> list[Question]:
    """Two seeded answers to every other question, as of requests with ``n`` 2, and log-probabilities of the first."""
    return [replace(question, sampling=replace_sampling(question.sampling, temperature=0.8, seed=7 * number + choice),
                    fields={} if choice else {"return_logprob": True, "top_logprobs_num": 2})
            for number, question in enumerate(asked[::2]) for choice in range(2)]


def _engine_of_tiers(*flags: str) -> FlagEngine:
    """An engine that takes computing for slow: what a tier has is loaded."""
    engine = FlagEngine(*BASE, *ROOMY, *flags)
    rate = engine.parts.batcher.rates.prefill_rate
    rate.end = rate._in_flight.popleft
    return engine


def float8_cache(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    return unified((*_FLOAT8, *flags), asked)


def pair_with_float8_cache(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    with started_pair(_FLOAT8, flags) as engines:
        return engines.answers(asked)


@contextmanager
def started_pair(flags: Sequence[str], algorithm: Sequence[str], **options: Sequence[str]) -> Iterator[FlagPair]:
    """A pair with ``flags`` and those of an algorithm, which without a draft model are decode's alone."""
    decode = list(algorithm) if "NGRAM" in algorithm else []
    with bootstrap_server() as port:
        pair = FlagPair(port, [*BASE, *ROOMY, *flags, *(algorithm if not decode else ())], decode_flags=decode,
                        **options)
        try:
            yield pair
        finally:
            pair.close()


def pair(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    with started_pair((), flags) as engines:
        return engines.answers(asked)


def pair_of_chunks(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    with started_pair((), flags, prefill_flags=CHUNKS) as engines:
        return engines.answers(asked)


def pair_with_delta(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Decode has most of each prompt already, and receives the rest."""
    with started_pair((), flags) as engines:
        engines.answers([replace(question, prompt=question.prompt[:len(question.prompt) * 2 // 3])
                         for question in asked])
        return engines.answers(asked)


def pair_continued(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    with started_pair((), flags) as engines:
        return _continued(engines.answers, asked)


def pair_retracted(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """Decode retracts all requests in the midst of their answers, and computes them again itself."""
    with started_pair((), flags) as engines:
        halves = [engines.start(str(number), question) for number, question in enumerate(asked)]
        assert len(halves) == len(asked)
        _retract(engines.decode, list(engines.decode.tracker.live.values()), engines.prefill)
        return engines.finish(len(asked))


def after_failover(flags: Sequence[str], asked: Sequence[Question]) -> list[Answer]:
    """The decode engine is lost once all pages are there, and another one gets them from the same prefill engine."""
    with started_pair((), flags) as engines:
        engines.connect()
        begun = [engines.start(str(number), question) for number, question in enumerate(asked)]
        run(engines.decode, until=lambda: engines.decode.scheduler.num_transferring == len(asked))
        run(engines.prefill, until=lambda: all(half.finish is not None for half, _ in begun)
            and engines.prefill.scheduler.idle)
        engines.prefill.take()
        engines.decode.scheduler.receiver.close()
        engines.new_decode()
        steps = engines.prefill.num_launched
        for number, question in enumerate(asked):
            engines.start(str(number), question, previous=begun[number][1])
        answers = engines.finish(len(asked))
        assert engines.prefill.num_launched == steps, "a prompt was computed again"
        return answers


SCENARIOS: Mapping[str, Scenario] = {
    "unified": unified, "chunked": chunked, "mixed chunk": mixed_chunk, "prefix hit": cached_prefix,
    "retraction": after_retraction, "small pool": small_pool, "retraction to host": after_swap,
    "continuation": continued, "TP 2": tensor_parallel, "DP attention": data_parallel, "host tier": host_tier,
    "storage": storage, "priority": preempted, "n, seeds, logprobs": sampled,
    "FP8 KV": float8_cache, "PD, FP8 KV": pair_with_float8_cache,
    "PD": pair, "PD, chunked": pair_of_chunks, "PD, prefix delta": pair_with_delta, "PD, failover": after_failover,
    "PD, continuation": pair_continued, "PD, retraction": pair_retracted,
    "PD, host tier": pair_with_host_tier, "PD, n, seeds, logprobs": pair_sampled}
"""By name; in each the questions may be of grammars, too."""

FEWER_DRAFTS = frozenset({small_pool})
"""Scenarios that have no pages for all drafts at times."""
_FEWER_IN_TREES = FEWER_DRAFTS | {mixed_chunk}
"""Scenarios that also verify a path of a tree only: steps with chunks of prompts do."""
_ASKED: Mapping[Scenario, Callable[[Sequence[Question]], list[Question]]] = {
    sampled: two_choices, pair_sampled: two_choices}
"""The questions as scenarios ask them: a prompt is asked twice at once, and its second answer finds what is there of
the first one's pages by then."""
_FLOAT8 = ("--kv-cache-dtype", "fp8_e4m3")
_HOST_TIER = ("--enable-hierarchical-cache", "--hicache-size", "0.2", "--hicache-load-policy", "always")
_OWN_FLAGS: Mapping[Scenario, Sequence[str]] = {float8_cache: _FLOAT8, pair_with_float8_cache: _FLOAT8}
"""Scenarios whose tokens are not those of the model in float32."""


# ---- comparison

_PLAIN: dict[tuple[Scenario, int, bool], list[Answer]] = {}


def plain_answers(scenario: Scenario, asked: Sequence[Question]) -> list[Answer]:
    """Those of plain decoding, computed once for the same questions."""
    key = (scenario, len(asked), asked[0].sampling.grammar is not None)
    if key not in _PLAIN:
        _PLAIN[key] = scenario((), asked)
    return _PLAIN[key]


@dataclass(frozen=True)
class Parity:
    """Results of a scenario: ``accepted`` tokens of ``steps`` verify steps, where ``expected`` would be right, and the
    same of each request's ``first`` verify step; the ``drafts`` of all steps; answers that are ``different`` from plain
    decoding's; and the most that ``cached_tokens`` are fewer than there."""

    steps: int
    accepted: int
    expected: int
    first: tuple[int, int]
    drafts: int
    different: int
    fewer_cached: int
    seconds: float

    @property
    def acceptance_length(self) -> float:
        return self.accepted / max(1, self.steps)

    def check(self) -> None:
        """Raises AssertionError where acceptance is not what it should be."""
        assert not self.different, f"{self.different} answers differ from plain decoding's"
        assert self.fewer_cached <= PAGE_SIZE, f"{self.fewer_cached} tokens fewer were cached"
        assert abs(self.accepted - self.expected) <= 0.01 * self.expected, (self.accepted, self.expected)
        assert abs(self.first[0] - self.first[1]) <= 0.02 * self.first[1], self.first


def _lengths(algorithm: str, scenario: Scenario, asked: Sequence[Question],
             answers: Sequence[Answer]) -> list[Mapping[int, int]]:
    """What steps should accept, by the output tokens before them."""
    own = _OWN_FLAGS.get(scenario, ())
    if own or algorithm in TREES or scenario in _ASKED:
        return [*lengths_computed_anew((*own, *algorithm_flags(algorithm)), num_drafts(algorithm), asked, answers)]
    return [dict(enumerate(step_lengths(algorithm, tuple(question.prompt), tuple(answer.tokens)), 1))
            for question, answer in zip(asked, answers)]


def measure(algorithm: str, scenario: Scenario, asked: Sequence[Question]) -> Parity:
    """Runs a scenario with an algorithm."""
    asked = _ASKED.get(scenario, list)(asked)
    begun = time.monotonic()
    answers = scenario(algorithm_flags(algorithm), asked)
    seconds = time.monotonic() - begun
    steps = accepted = expected = drafts = 0
    first = [0, 0]
    plain = plain_answers(scenario, asked)
    for answer, lengths in zip(answers, _lengths(algorithm, scenario, asked, answers)):
        for place, (known, verified, length) in enumerate(answer.verified):
            wanted = lengths[known]
            if algorithm in TREES and scenario in _FEWER_IN_TREES and verified < num_drafts(algorithm):
                wanted = length  # a smaller tree has other drafts than the first ones of a larger one
            elif scenario in FEWER_DRAFTS:
                wanted = min(wanted, verified + 1)
            steps, accepted, expected, drafts = steps + 1, accepted + length, expected + wanted, drafts + verified
            if place == 0:
                first = [first[0] + length, first[1] + wanted]
    return Parity(steps, accepted, expected, (first[0], first[1]), drafts,
                  sum(one.tokens != other.tokens for one, other in zip(answers, plain)),
                  0 if scenario in _ASKED else max(other.cached_tokens - one.cached_tokens
                                                   for one, other in zip(answers, plain)), seconds)
