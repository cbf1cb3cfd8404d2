"""Grammars on their way into the engine: tried apart, bounded, cached, let go of."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.common.api.errors import ConfigError, InvalidRequest, Overloaded
from baton.common.api.grammar import GrammarSpec
from baton.common.api.messages import DropGrammar, PrepareGrammar, decode_to_engine, encode
from baton.common.config.server import GrammarArgs
from baton.common.grammar import service as service_module
from baton.common.grammar.fair_slots import FairSlots
from baton.common.grammar.service import GrammarService
from baton.common.grammar.store import GrammarStore
from baton.common.grammar.trial import Budget, Compiled, OverBudget, Trial
from baton.tests.helpers.grammar_engine import schema_spec, tokenizer, vocabulary

HEAVY = GrammarSpec("regex", "(" + "|".join(f"w{i}" for i in range(60_000)) + ")*")

BUDGET = Budget(30.0)


@pytest.fixture(scope="module")
def trial():
    trial = Trial(vocabulary(), None)
    trial.compile(GrammarSpec("regex", "warm"), BUDGET)
    yield trial
    trial.close()


@pytest.mark.parametrize(("spec", "reason"), [
    (GrammarSpec("regex", "(a"), "parenthesis is not closed"),
    (GrammarSpec("regex", "(?=a)b"), "Lookahead"),
    (GrammarSpec("ebnf", 'root ::= "a" other'), 'Rule "other" is not defined'),
    (GrammarSpec("ebnf", 'start ::= "a"'), 'name "root" is not found'),
    (GrammarSpec("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "Nest layer"),
    (schema_spec({"type": "strnig"}), 'Unsupported type "strnig"'),
    (schema_spec({"$ref": "#/$defs/none"}), "$defs"),
    (schema_spec({"type": "integer", "minimum": 5, "maximum": 3}), "minimum greater than maximum"),
    (schema_spec(False), "cannot accept any value"),
    (GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"nope"}}'), "nope"),
    (GrammarSpec("structural_tag", "{}"), "structural"),
    (GrammarSpec("ebnf", "root ::= root"), "allows no answer"),
], ids=lambda value: value.kind if isinstance(value, GrammarSpec) else "")
def test_a_mistake_is_told_in_a_sentence(trial, spec, reason):
    with pytest.raises(InvalidRequest) as caught:
        trial.compile(spec, BUDGET)
    message = caught.value.message
    assert reason in message and message.endswith(".") and "/project/" not in message and len(message) < 700


@pytest.fixture(scope="module")
def trial_of_llguidance():
    trial = Trial(vocabulary(), None, backend="llguidance")
    yield trial
    trial.close()


@pytest.mark.parametrize(("spec", "reason"), [
    (GrammarSpec("regex", "(a"), "unclosed group"), (GrammarSpec("regex", "(?=a)b"), "look-around"),
    (GrammarSpec("regex", "a)|(b"), "unopened group"),
    (GrammarSpec("ebnf", 'root ::= "a" other'), 'Rule "other" is not defined'),
    (GrammarSpec("ebnf", 'start ::= "a"'), 'name "root" is not found'),
    (GrammarSpec("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "Nest layer"),
    (GrammarSpec("ebnf", "root ::= Token(3)"), "xgrammar's alone"), (GrammarSpec("ebnf", "root ::= [z-a]"), "order"),
    (GrammarSpec("ebnf", 'root ::= "a" "b'), "line 1 has"), (GrammarSpec("ebnf", "%llguidance {}\nstart: x"), "x"),
    (GrammarSpec("ebnf", "root ::= root"), "allows no answer"),
    (GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"nope"}}'), "nope"),
    (GrammarSpec("structural_tag", "{}"), "structural_tag"), (GrammarSpec("structural_tag", "{"), "JSON"),
    (GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"const_string"}}'), "must have value"),
    (GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"token","token":"no such"}}'),
     "no token"),
    (GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"any_text","max_tokens":4}}'),
     "max_tokens of any_text"),
    (GrammarSpec("regex", "((((a{1,900}){1,900}){1,900}){1,900}b)?c{1,9999}d"), None),
    (schema_spec({"type": "strnig"}), "strnig"), (schema_spec({"$ref": "#/$defs/none"}), "$defs"),
    (schema_spec({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
    (schema_spec(False), "schema is false"),
], ids=lambda value: value.kind if isinstance(value, GrammarSpec) else "")
def test_a_mistake_is_told_by_llguidance_too(trial_of_llguidance, spec, reason):
    """``reason`` is None where the grammar is large, and nothing but its limits counts."""
    try:
        trial_of_llguidance.compile(spec, BUDGET)
    except InvalidRequest as error:
        message = error.message
        assert (reason or "") in message and message.endswith(".") and "start:" not in message and len(message) < 700
    else:
        assert reason is None


def test_llguidance_loads_what_it_wrote(trial_of_llguidance):
    specs = [schema_spec({"type": "integer"}), GrammarSpec("regex", "a+"), GrammarSpec("ebnf", 'root ::= "a" root?'),
             GrammarSpec("ebnf", "%llguidance {}\nstart: /a/ | start /b/"),
             GrammarSpec("structural_tag", '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}')]
    store = GrammarStore(None, 4096, frozenset([2]), "outlines")  # llguidance's other name
    for seq, spec in enumerate(specs):
        store.prepare(PrepareGrammar(seq, spec, vocabulary(), trial_of_llguidance.compile(spec, BUDGET).text))
    answers = []
    while store.busy:
        answers += store.finished()
        time.sleep(0.01)
    assert [done.code for done in answers] == [None] * len(specs) and store._compiled.keys() == {*specs}
    store.close()


@pytest.mark.parametrize("cpu_time", [False, True])
def test_what_takes_too_long_is_given_up_and_nobody_waits_for_it(trial, cpu_time):
    with ThreadPoolExecutor(1) as other:
        began = time.monotonic()
        heavy = other.submit(trial.compile, HEAVY, Budget(1.0, cpu_time))
        assert trial.compile(GrammarSpec("regex", "x+"), BUDGET).num_bytes > 0
        assert not heavy.done() or time.monotonic() - began >= 1.0
        with pytest.raises(OverBudget):
            heavy.result(30)
    assert trial.compile(GrammarSpec("regex", "y+"), BUDGET).num_bytes > 0


def test_a_process_that_dies_is_started_again(trial):
    os.kill(trial._process.pid, signal.SIGKILL)
    assert trial.compile(GrammarSpec("regex", "b"), BUDGET).num_bytes > 0


def test_what_a_grammar_was_compiled_to_is_loaded(trial):
    for spec in (schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}}), GrammarSpec("regex", "a+"),
                 GrammarSpec("structural_tag",
                             '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}')):
        compiled = trial.compile(spec, BUDGET)
        store = GrammarStore(None, 4096, frozenset([2]))
        store.prepare(PrepareGrammar(7, spec, vocabulary(), compiled.text))
        while not (answers := store.finished()):
            time.sleep(0.01)
        assert answers[0].code is None
        assert store._compiled[spec].serialize_json() == compiled.text
        store.close()


@pytest.mark.slow
def test_what_takes_too_much_memory_is_refused():
    trial = Trial(vocabulary(), None, memory_bytes=32 << 20)
    try:
        with pytest.raises(InvalidRequest, match="too large|memory|bad_alloc|MemoryError"):
            trial.compile(HEAVY, Budget(60.0))
        assert trial.compile(GrammarSpec("regex", "x+"), BUDGET).num_bytes > 0
    finally:
        trial.close()


class Engine:
    """Takes grammars and tells what it was asked."""

    def __init__(self):
        self.prepared: list[GrammarSpec] = []
        self.dropped: list[GrammarSpec] = []
        self.vocabularies = 0

    async def prepare_grammar(self, spec, vocabulary, compiled):
        self.vocabularies += vocabulary is not None
        self.prepared.append(spec)
        await asyncio.sleep(0)

    def drop_grammar(self, spec):
        self.dropped.append(spec)


class FakeTrial:
    """In place of a process: 'bad' is refused, 'slow' is over the first budget, other grammars take 100 bytes."""

    checked: list[GrammarSpec] = []
    go_on = threading.Event()

    def __init__(self, vocabulary, whitespace, backend):
        self.vocabulary = vocabulary

    def compile(self, spec, budget):
        self.checked.append(spec)
        if spec.text.startswith("slow"):
            if budget.cpu_time:
                raise OverBudget
            assert self.go_on.wait(10)
        time.sleep(0.02)
        if spec.text.startswith("bad"):
            raise InvalidRequest("It is bad.")
        return Compiled(100, None)

    def close(self):
        pass


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def service(engine, monkeypatch):
    monkeypatch.setattr(service_module, "Trial", FakeTrial)
    monkeypatch.setattr(FakeTrial, "checked", [])
    service = GrammarService(GrammarArgs(), engine, 4096, [2])
    yield service
    service.close()


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


async def test_equal_grammars_are_compiled_once(service, engine):
    await asyncio.gather(*[service.prepare(regex(text), tokenizer(), "regex") for text in "aabab"])
    await service.prepare(regex("a"), tokenizer(), "regex")
    assert {*FakeTrial.checked} == {*engine.prepared} == {regex("a"), regex("b")} and len(FakeTrial.checked) == 2
    assert engine.vocabularies == 1


async def test_a_refusal_is_remembered_and_names_the_parameter(service, engine):
    for param in ("regex", "tools"):
        with pytest.raises(InvalidRequest, match="It is bad") as caught:
            await service.prepare(regex("bad"), tokenizer(), param)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")
    assert len(FakeTrial.checked) == 1 and not engine.prepared


async def test_the_oldest_grammars_make_room(service, engine, monkeypatch):
    monkeypatch.setattr(service_module, "CACHE_BYTES", 250)
    for text in ("a", "b", "a", "bad", "c"):
        try:
            await service.prepare(regex(text), tokenizer(), "regex")
        except InvalidRequest:
            assert text == "bad"
    assert [spec.text for spec in engine.dropped] == ["b"]
    await service.prepare(regex("b"), tokenizer(), "regex")
    assert [spec.text for spec in engine.dropped] == ["b", "a"] and [s.text for s in engine.prepared] == list("abcb")


async def test_what_came_to_nothing_makes_room_too(service, engine, monkeypatch):
    """Refused grammars, and those that the engine failed to prepare: each keeps its source, of up to 256 KiB."""
    monkeypatch.setattr(service_module, "CACHE_COUNT", 4)
    kept = GrammarSpec("regex", "kept")
    await service.prepare(kept, tokenizer(), None)

    async def fail(spec, vocabulary, compiled):
        raise Overloaded("later")

    for i in range(12):
        await service.prepare(kept, tokenizer(), None)  # used again and again, it stays
        with monkeypatch.context() as patched:
            patched.setattr(engine, "prepare_grammar", fail)
            with pytest.raises((InvalidRequest, Overloaded)):
                await service.prepare(GrammarSpec("ebnf", f"bad {i}" if i % 2 else f"unlucky {i}"), tokenizer(), None)
    assert len(service._outcomes) <= 5
    assert kept in service._outcomes and not engine.dropped


async def test_a_client_that_leaves_does_not_spoil_it_for_others(service):
    first = asyncio.create_task(service.prepare(regex("a"), tokenizer(), "regex"))
    second = asyncio.create_task(service.prepare(regex("a"), tokenizer(), "regex"))
    await asyncio.sleep(0.001)
    first.cancel()
    await second
    assert len(FakeTrial.checked) == 1


async def test_the_loop_goes_on_meanwhile_and_the_queue_is_bounded(service, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_WAITING", 3)
    waiting = [asyncio.create_task(service.prepare(regex(text), tokenizer(), None)) for text in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await service.prepare(regex("d"), tokenizer(), None)
    await asyncio.gather(*waiting)
    await service.prepare(regex("d"), tokenizer(), None)


async def test_slow_ones_wait_behind_each_other_and_hold_up_nobody(service, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_SLOW_PER_CLIENT", 3)
    monkeypatch.setattr(FakeTrial, "go_on", threading.Event())
    slow = [asyncio.create_task(service.prepare(regex(f"slow {i}"), tokenizer(), None, "greedy")) for i in range(6)]
    await asyncio.wait_for(service.prepare(regex("small"), tokenizer(), None, "other"), 5)
    done, waiting = await asyncio.wait(slow, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
    while len(done) < 2:  # one is compiled, three wait
        done, waiting = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
        done = {task for task in slow if task.done()}
    assert [type(task.exception()) for task in done] == [Overloaded] * 2 and len(waiting) == 4
    theirs = asyncio.create_task(service.prepare(regex("slow, of another"), tokenizer(), None, "other"))
    await asyncio.wait_for(service.prepare(regex("small, too"), tokenizer(), None, "other"), 5)
    FakeTrial.go_on.set()
    await asyncio.gather(theirs, *waiting)
    assert FakeTrial.checked.index(regex("slow, of another")) < len(FakeTrial.checked)


async def test_a_client_has_a_share_of_the_queue(service, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_WAITING_PER_CLIENT", 2)
    waiting = [asyncio.create_task(service.prepare(regex(text), tokenizer(), None, "one")) for text in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="of this client"):
        await service.prepare(regex("c"), tokenizer(), None, "one")
    await service.prepare(regex("c"), tokenizer(), None, "two")
    await asyncio.gather(*waiting)


async def test_clients_take_turns():
    slots, order = FairSlots(1), []

    async def work(client: str) -> None:
        async with slots.slot(client):
            order.append(client)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(client)) for client in "aaaab"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "a", "a"] and slots.num_waiting("a") == 0
    await work("c")


async def test_what_no_server_takes(engine):
    for args, stop_ids, spec, words in (
            (GrammarArgs(grammar_backend="none"), [2], regex("a"), "--grammar-backend"),
            (GrammarArgs(), [], regex("a"), "end-of-sequence"),
            (GrammarArgs(), [2], regex("a" * 300_000), "characters")):
        with pytest.raises(InvalidRequest, match=words):
            await GrammarService(args, engine, 4096, stop_ids).prepare(spec, tokenizer(), "regex")


@pytest.mark.parametrize("args", [
    {"constrained_json_whitespace_pattern": "["}, {"constrained_json_whitespace_pattern": "x+"},
    {"constrained_json_whitespace_pattern": " ", "constrained_json_disable_any_whitespace": True}])
def test_flags_that_make_no_sense_are_refused(args):
    with pytest.raises(ConfigError, match="--constrained-json-whitespace-pattern"):
        GrammarArgs(**args)


def test_the_store_compiles_beside_and_forgets():
    store = GrammarStore(None, 4096, frozenset([2]))
    message = PrepareGrammar(7, regex("a+"), vocabulary())
    assert decode_to_engine(encode(message)) == message
    store.prepare(message)
    store.prepare(PrepareGrammar(8, regex("(a")))
    answers = []
    while store.busy:
        answers += store.finished()
        time.sleep(0.01)
    assert [(done.seq, done.code) for done in answers] == [(7, None), (8, "invalid_request")]
    assert list(store._compiled) == [regex("a+")]
    store.drop(decode_to_engine(encode(DropGrammar(regex("a+")))).spec)
    store.drop(regex("never seen"))
    assert not store._compiled
    store.close()
