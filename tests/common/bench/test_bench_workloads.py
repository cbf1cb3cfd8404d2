"""Data sets, arrival times, and the runs that follow them: by a clock that jumps."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import numpy as np
import pytest

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.bench.client.answer import Failure
from baton.common.bench.client.load import Load
from baton.common.bench.report.figures import figures
from baton.common.bench.workloads.arrivals import arrivals
from baton.common.bench.workloads.dataset_args import DatasetArgs
from baton.common.bench.workloads.datasets import make_workload
from baton.common.bench.workloads.shared_prefix import shareable
from baton.common.bench.workloads.vocabulary import Vocabulary
from baton.common.bench.workloads.workload import Conversation, Prompt, Turn, num_requests, single
from baton.common.kvcache.manager import KVCacheManager
from baton.common.tokenizer.tokenizer import load_tokenizer
from baton.tests.helpers import virtual_time


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tinychat")


@pytest.fixture(scope="module")
def ids():
    return Vocabulary(5000, None, as_ids=True)


@pytest.fixture(scope="module")
def text(tokenizer):
    return Vocabulary(tokenizer.size, tokenizer, as_ids=False)


def prompts(conversations):
    return [turn.prompt for conversation in conversations for turn in conversation.turns]


# ---------------------------------------------------------------------- prompts


def test_random_words_have_as_many_tokens_as_asked_for(text, tokenizer):
    args = DatasetArgs(num_prompts=20, random_input_len=100, random_output_len=8, random_range_ratio=0.5)
    for prompt in prompts(make_workload(args, text)):
        assert 50 <= prompt.num_tokens <= 100 and prompt.ids is None
        assert len(tokenizer.encode(prompt.text, add_special_tokens=False)) == prompt.num_tokens


def test_lengths_are_drawn_between_the_ratio_and_all_of_it(ids):
    args = DatasetArgs(dataset_name="random-ids", num_prompts=2000, random_input_len=20, random_output_len=10,
                       random_range_ratio=0.5)
    made = make_workload(args, ids)
    assert {prompt.num_tokens for prompt in prompts(made)} == set(range(10, 21))
    assert {conversation.turns[0].output_len for conversation in made} == set(range(5, 11))
    for ratio, lengths in ((0.0, set(range(1, 6))), (1.0, {5})):
        args = DatasetArgs(num_prompts=200, random_input_len=5, random_range_ratio=ratio, dataset_name="random-ids")
        assert {prompt.num_tokens for prompt in prompts(make_workload(args, ids))} == lengths


def test_the_seed_decides(ids):
    def drawn(seed):
        args = DatasetArgs(dataset_name="random-ids", num_prompts=5, seed=seed)
        return [prompt.ids for prompt in prompts(make_workload(args, ids))]

    assert drawn(1) == drawn(1) != drawn(2)


def test_text_takes_a_tokenizer():
    with pytest.raises(ConfigError, match="--tokenizer"):
        Vocabulary(100, None, as_ids=False)


def hit_rate(conversations, page_size=4):
    """Of a prefix cache that forgets nothing, one prompt after the other."""
    cache = KVCacheManager(100_000, page_size, True)
    cached = total = 0
    for prompt in prompts(conversations):
        tokens = np.array(prompt.ids, np.int32)
        table = cache.match_prefix(tokens, len(tokens))
        cached += table.num_cached_pages * page_size
        total += len(tokens)
        assert cache.allocate_slots(table, len(tokens))
        cache.release(table, tokens)
    return cached / total


def test_groups_share_their_beginning_and_nothing_else(ids):
    args = DatasetArgs(dataset_name="generated-shared-prefix", gsp_num_groups=5, gsp_prompts_per_group=4,
                       gsp_system_prompt_len=64, gsp_question_len=16, gsp_output_len=7)
    made = make_workload(args, ids)
    groups = Counter(tuple(prompt.ids[:64]) for prompt in prompts(made))
    assert set(groups.values()) == {4} and len(groups) == 5
    assert len({tuple(prompt.ids) for prompt in prompts(made)}) == 20
    assert {conversation.turns[0].output_len for conversation in made} == {7}
    first = [tuple(prompt.ids[:64]) for prompt in prompts(made)][:4]
    assert len(set(first)) > 1, "groups come in turn, not one after the other"
    assert shareable(args) == pytest.approx(0.8 * 0.75)
    assert hit_rate(made) == pytest.approx(shareable(args), abs=0.01)


def test_chats_have_turns_that_add_up(ids):
    args = DatasetArgs(dataset_name="multi-turn", num_prompts=10, num_turns=4, random_input_len=5,
                       random_range_ratio=1.0)
    ids_with_words = Vocabulary(ids.size, load_tokenizer("tinychat"), as_ids=True)
    made = make_workload(args, ids_with_words)
    assert [len(conversation.turns) for conversation in made] == [4, 4, 2] and num_requests(made) == 10


# ---------------------------------------------------------------------- files


def write(path, entries):
    path.write_text(json.dumps(entries))
    return str(path)


def talk(*said, role="from", words="value"):
    return {"conversations": [{role: "human" if i % 2 == 0 else "gpt", words: text} for i, text in enumerate(said)]}


def test_sharegpt_asks_first_questions_for_answers_as_long(tmp_path, text, tokenizer):
    question, answer = "What is the capital of France?", "The capital of France is Paris, as everybody knows."
    path = write(tmp_path / "file.json", [talk(question, answer, "And of Spain?", "Madrid."), talk("alone"), talk(),
                                          talk(question * 9, answer, role="role", words="content"), talk("a", "b")])
    made = make_workload(DatasetArgs(dataset_name="sharegpt", dataset_path=path), text)
    tokens = len(tokenizer.encode(answer, add_special_tokens=False))
    assert {prompt.text for prompt in prompts(made)} == {question, question * 9}
    assert {conversation.turns[0].output_len for conversation in made} == {tokens}
    short = DatasetArgs(dataset_name="sharegpt", dataset_path=path, sharegpt_output_len=3, sharegpt_context_len=20)
    (only,) = make_workload(short, text)
    assert only.turns[0].prompt.text == question and only.turns[0].output_len == 3
    drawn = make_workload(DatasetArgs(dataset_path=path, num_prompts=3, random_input_len=40, random_range_ratio=1.0),
                          Vocabulary(text.size, tokenizer, as_ids=True))
    assert [len(prompt.ids) for prompt in prompts(drawn)] == [40] * 3
    assert any("France" in tokenizer.decode(prompt.ids, skip_special_tokens=False) for prompt in prompts(drawn))


def test_questions_get_a_suffix_and_the_chat_template(tmp_path, text, tokenizer):
    path = write(tmp_path / "file.json", [talk("What is the capital of France?", "Paris, of course.")])
    args = DatasetArgs(dataset_name="sharegpt", dataset_path=path, prompt_suffix=" Be brief.", apply_chat_template=True)
    ((asked,), (sent,)) = (prompts(make_workload(args, Vocabulary(text.size, tokenizer, as_ids=as_ids)))
                           for as_ids in (False, True))
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France? Be brief."}], tools=None,
                                 continue_final_message=False, options={})
    assert asked.text == chat and tokenizer.decode(sent.ids, skip_special_tokens=False) == chat


class Chats:
    """A tokenizer that puts a token before each text, as its template does; or has no template."""

    special_ids = frozenset((0,))

    def __init__(self, template=True):
        self._template = template

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + [1] * len(text)

    def decode(self, ids, *, skip_special_tokens):
        return "".join("<s>" if i == 0 else "x" for i in ids)

    def render_chat(self, messages, *, tools, continue_final_message, options):
        if not self._template:
            raise InvalidRequest("The model has no chat template.")
        return f"<s>[{messages[0]['content']}]"


def test_a_chat_begins_with_the_first_token_once():
    assert Vocabulary(9, Chats(), as_ids=False).chat("Hi") == "[Hi]"
    assert Vocabulary(9, Chats(), as_ids=True).chat("Hi") == "<s>[Hi]"
    with pytest.raises(ConfigError, match="--apply-chat-template: The model has no chat template"):
        Vocabulary(9, Chats(template=False), as_ids=False).chat("Hi")


@pytest.mark.parametrize("content, words", [
    ("{", "no ShareGPT file"), ('[{"conversations": [{"from": "human"}]}]', "no ShareGPT file"), ("[3]", "no ShareGPT"),
    ("[]", "no question"), (None, "Cannot read")])
def test_files_that_are_none_are_sentences(tmp_path, text, content, words):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        make_workload(DatasetArgs(dataset_name="sharegpt", dataset_path=str(path)), text)


TRACE = [
    {"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 1000, "input_length": 1030, "output_length": 4, "hash_ids": [1, 2, 3]},
    {"timestamp": 4500, "input_length": 600, "output_length": 3, "hash_ids": [9, 2]},
    {"timestamp": 5000, "input_length": 40, "output_length": 2, "hash_ids": []},
]


def trace_file(tmp_path, lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_equal_hashes_of_a_trace_are_equal_blocks(tmp_path, ids):
    path = trace_file(tmp_path, TRACE)
    made = make_workload(DatasetArgs(dataset_name="trace", dataset_path=path, trace_scale=0.5), ids)
    assert [conversation.at for conversation in made] == [0.0, 0.5, 1.75, 2.0]
    longest, second, other, alone = (prompt.ids for prompt in prompts(made))
    assert [len(x) for x in (longest, second, other, alone)] == [1030, 700, 600, 40]
    assert second == longest[:700] and other[:512] != longest[:512] and other[512:] == longest[512:600]
    assert [conversation.turns[0].output_len for conversation in made] == [4, 5, 3, 2]
    again = make_workload(DatasetArgs(dataset_name="mooncake", dataset_path=path), ids)
    assert prompts(again)[0].ids == longest and [c.at for c in again] == [0.0, 1.0, 3.5, 4.0]
    # 700 tokens of the second prompt are cached, but for the last page, which is never taken whole
    assert hit_rate(made) == pytest.approx(700 / 2370, abs=0.01)
    first_two = make_workload(DatasetArgs(dataset_name="trace", dataset_path=path, num_prompts=2), ids)
    assert len(first_two) == 2


def test_a_workload_names_its_file_and_rounds_make_chats(tmp_path, ids):
    for name, output_len in (("conversation", 11), ("toolagent", 22)):
        line = {"timestamp": 0, "input_length": 10, "output_length": output_len}
        (tmp_path / f"{name}_trace.jsonl").write_text(json.dumps(line))
    for workload, output_len in (("conversation", 11), ("agent", 22)):
        args = DatasetArgs(dataset_name="mooncake", dataset_path=str(tmp_path), mooncake_workload=workload,
                           mooncake_num_rounds=3)
        (chat,) = make_workload(args, ids)
        assert [turn.output_len for turn in chat.turns] == [output_len] * 3 and chat.at == 0.0
        assert len({tuple(turn.prompt.ids) for turn in chat.turns}) == 1 and num_requests([chat]) == 3
    with pytest.raises(ConfigError, match="synthetic_trace.jsonl: No such file"):
        DatasetArgs(dataset_name="mooncake", dataset_path=str(tmp_path), mooncake_workload="synthetic")


@pytest.mark.parametrize("line, words", [
    ({"timestamp": 1, "input_length": 0, "output_length": 1}, "Line 2"), ({"timestamp": 1}, "input_length")])
def test_lines_of_a_trace_that_are_none_are_sentences(tmp_path, ids, line, words):
    path = trace_file(tmp_path, [TRACE[0], line])
    with pytest.raises(ConfigError, match=words):
        make_workload(DatasetArgs(dataset_name="trace", dataset_path=path), ids)


@pytest.mark.parametrize("fields, words", [
    ({"num_prompts": 0}, "--num-prompts"), ({"random_range_ratio": 1.5}, "--random-range-ratio"),
    ({"apply_chat_template": True}, "--apply-chat-template"), ({"prompt_suffix": "?"}, "sharegpt"),
    ({"mooncake_num_rounds": 2}, "mooncake"), ({"mooncake_num_rounds": 0}, "--mooncake-num-rounds"),
    ({"dataset_name": "trace", "mooncake_workload": "agent", "dataset_path": "/nowhere"}, "folder"),
    ({"dataset_name": "trace"}, "--dataset-path"), ({"trace_scale": -1.0}, "--trace-scale"),
    ({"dataset_name": "sharegpt", "dataset_path": "/nowhere"}, "Cannot read --dataset-path /nowhere: No such file")])
def test_arguments_that_make_no_sense_are_sentences(fields, words):
    with pytest.raises(ConfigError, match=words):
        DatasetArgs(**fields)


# ---------------------------------------------------------------------- arrivals


def plain(count):
    return [single(Prompt(1, ids=[i]), 2) for i in range(count)]


def test_poisson_arrivals_have_the_rate_and_its_spread():
    due = arrivals(plain(20_000), 50.0, random.Random(3))
    gaps = [b - a for a, b in zip(due, due[1:])]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert due[0] == 0 and min(gaps) >= 0
    assert mean == pytest.approx(0.02, rel=0.03) and spread == pytest.approx(mean, rel=0.05)
    assert arrivals(plain(9), 50.0, random.Random(3)) == due[:9]


def test_without_a_rate_a_trace_keeps_its_times_and_others_come_at_once():
    timed = [single(Prompt(1, ids=[1]), 1, at) for at in (0.0, 2.5)]
    assert arrivals(timed, None, random.Random(0)) == [0.0, 2.5]
    assert arrivals(timed, float("inf"), random.Random(0)) == [0.0, 0.0]
    assert arrivals(plain(2), None, random.Random(0)) == [0.0, 0.0]


# ---------------------------------------------------------------------- runs


class Server:
    """Answers after ``seconds``, two events; fails for ids in ``failing``."""

    def __init__(self, clock, seconds=1.0, failing=()):
        self.clock, self.seconds, self.failing = clock, seconds, failing
        self.open = self.most = self.prepared = 0
        self.asked = []

    def prepare(self, conversation):
        self.prepared += 1

    async def send(self, conversation, said, answer):
        self.asked.append((self.clock(), [before.text for _, before in said]))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.seconds / 2)
            if answer.prompt.ids[0] in self.failing:
                raise Failure("HTTP 500", "no")
            answer.record_event(self.clock())
            await asyncio.sleep(self.seconds / 2)
            answer.record_event(self.clock())
            answer.text = f"answer {answer.prompt.ids[0]}"
        finally:
            self.open -= 1


def played(conversations, due, *, cancel_at=None, **options):
    async def main(clock):
        server = Server(clock, failing=options.pop("failing", ()))
        load = Load(server, clock, **options)
        run = asyncio.ensure_future(load.run(conversations, due))
        if cancel_at is not None:
            asyncio.get_running_loop().call_at(cancel_at, run.cancel)
        await asyncio.gather(run, return_exceptions=True)
        return server, load, figures(load.answers, load.duration, interrupted=len(conversations) - len(load.answers))

    return virtual_time.run(main)


def test_a_closed_loop_keeps_so_many_open():
    server, load, found = played(plain(10), [0.0] * 10, max_concurrency=4)
    assert server.most == 4 and server.prepared == 10
    assert [at for at, _ in server.asked] == pytest.approx([0] * 4 + [1] * 4 + [2] * 2)
    assert found.duration == pytest.approx(3) and found.concurrency == pytest.approx(10 / 3)
    assert found.ttft.p50 == pytest.approx(500) and found.e2e.p99 == pytest.approx(1000)


def test_an_open_loop_waits_for_nobody():
    due = [0.0, 0.1, 0.15, 3.0]
    server, load, _ = played(plain(4), due)
    assert [at for at, _ in server.asked] == pytest.approx(due) and server.most == 3
    assert load.duration == pytest.approx(4)
    assert figures(load.answers, load.duration, timed=True).late.max == pytest.approx(0)


def test_a_limit_on_an_open_loop_makes_it_late():
    _, load, _ = played(plain(3), [0.0, 0.5, 0.75], max_concurrency=1)
    assert [answer.sent - answer.due for answer in load.answers] == pytest.approx([0, 0.5, 1.25])


def test_each_turn_waits_for_the_answer_before():
    chat = Conversation(tuple(Turn(Prompt(1, ids=[i]), 2) for i in range(3)))
    server, _, found = played([chat], [0.0])
    assert server.asked == [(0, []), (1, ["answer 0"]), (2, ["answer 0", "answer 1"])] and found.completed == 3


def test_a_turn_that_fails_takes_those_behind_it_along():
    chat = Conversation(tuple(Turn(Prompt(1, ids=[i]), 2) for i in range(3)))
    _, load, found = played([chat], [0.0], failing={1})
    assert found.completed == 1 and found.failed == {"HTTP 500": 1, "turn before failed": 1}


def test_what_is_cancelled_keeps_what_has_ended():
    told = []
    server, load, found = played(plain(10), [0.0] * 10, max_concurrency=2, cancel_at=2.6,
                                 ended=lambda answer, load: told.append(answer))
    assert found.completed == len(told) == 4 and found.interrupted == 6 and server.open == 0 and load.num_open == 0
    assert found.duration == pytest.approx(2.6) and found.rate(found.completed) == pytest.approx(4 / 2.6)


def test_a_mistake_of_ours_is_not_a_failed_request():
    class Broken(Server):
        async def send(self, conversation, said, answer):
            raise KeyError("a bug")

    async def main(clock):
        await Load(Broken(clock), clock).run(plain(2), [0.0, 1.0])

    with pytest.raises(KeyError):
        virtual_time.run(main)
