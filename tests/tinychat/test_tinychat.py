"""tinychat: its tasks, its tokenizer and template, its checkpoint's limits, and what it answers."""

import asyncio
import json
import subprocess
import sys

import pytest
from aiohttp import web

from baton.common.tinychat import CHECKPOINT
from baton.tests.tinychat import evaluate, words
from baton.tests.tinychat.tasks import TASKS, Example, examples, held_out, matches

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


# ---- tasks

def test_importing_the_tasks_needs_the_standard_library_alone():
    script = ("import sys, baton.tests.tinychat.tasks; "
              "print([m for m in ('torch', 'transformers', 'numpy', 'aiohttp') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_same_seed_same_examples_in_every_process():
    script = ("from baton.tests.tinychat.tasks import held_out; import zlib; "
              "print(zlib.crc32(repr(held_out(60, seed=3)).encode()))")
    runs = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}).stdout for seed in "12"}
    assert len(runs) == 1
    assert held_out(60, seed=3) != held_out(60, seed=4)


def test_held_out_takes_turns_and_keeps_a_task_the_same_whichever_others_are_asked():
    assert [example.task for example in held_out(len(TASKS) + 1)] == [*TASKS, TASKS[0]]
    assert held_out(3, tasks=["sums"]) == [example for example in held_out(3 * len(TASKS)) if example.task == "sums"]


@pytest.mark.parametrize("task", TASKS)
def test_held_out_questions_are_not_in_training(task):
    def asked(split):  # a system prompt makes no question new, except where it holds the needle
        return {json.dumps([[m for m in example.messages if task == "needle" or m["role"] != "system"], example.tools])
                for example in examples(task, 5, 1500, split)}

    assert len(asked("held_out")) > 20
    assert not asked("train") & asked("held_out")


def numbers_of(example):
    digits = "".join(c if c.isdigit() else " " for c in example.question).split()
    return tuple(sorted(map(int, digits)))


@pytest.mark.parametrize(("task", "key"), [
    ("sums", numbers_of), ("count", numbers_of), ("needle", lambda example: example.answer),
    ("reverse", lambda example: example.answer.lower().replace("-", "")), ("repeat", lambda example: example.answer),
    ("json", lambda example: example.answer)])
def test_what_is_held_out_is_the_thing_itself_not_its_wording(task, key):
    train = {key(example) for example in examples(task, 1, 3000, "train")}
    assert not train & {key(example) for example in examples(task, 2, 1000, "held_out")}


def test_answers_are_right():
    for example in examples("sums", 0, 50, "held_out"):
        assert sum(numbers_of(example)) == int(example.answer)
    for example in examples("reverse", 0, 50, "held_out"):
        assert example.answer[::-1] in example.question
    for example in examples("needle", 0, 50, "held_out"):
        assert any(f" is {example.answer}." in message["content"] for message in example.messages)
    for example in examples("capitals", 0, 50, "held_out"):
        assert any({example.answer} < {country, city} and (city if example.answer == country else country)
                   in example.question for country, city in words.CAPITALS.items())


def call_example():
    return next(example for example in examples("tools", 0, 50) if example.answer.startswith("<tool_call>"))


def test_matches_takes_text_dict_and_parsed_calls_and_nothing_else():
    plain = held_out(1, tasks=["sums"])[0]
    assert matches(plain, plain.answer) and matches(plain, {"content": f" {plain.answer}\n", "tool_calls": None})
    assert not matches(plain, plain.answer + "0") and not matches(plain, {"content": None})
    example = call_example()
    call = json.loads(example.answer.split("\n")[1])
    parsed = {"id": "call_1", "type": "function",
              "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], indent=1)}}
    assert matches(example, example.answer) and matches(example, {"content": None, "tool_calls": [parsed]})
    assert not matches(example, {"content": None, "tool_calls": [parsed, parsed]})
    assert not matches(plain, {"content": plain.answer, "tool_calls": [parsed]})
    wrong = {**parsed, "function": {**parsed["function"], "arguments": "{}"}}
    assert not matches(example, {"content": None, "tool_calls": [wrong]})
    broken = {**parsed, "function": {**parsed["function"], "arguments": "{"}}
    assert not matches(example, {"content": None, "tool_calls": [broken]})


# ---- tokenizer and template

def test_tokenizer_round_trip(tokenizer):
    texts = ["", "Zażółć gęślą jaźń 🙂\t日本語\r\n  x", '{"a_b": [1, 2.5, null]}', "  two  spaces ", "\x00\x7f"]
    texts += [message["content"] or "" for example in held_out(48) for message in example.conversation()]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_letters_stand_alone_where_they_are_to_be_handled(tokenizer):
    assert pieces(tokenizer, '"water"') == ['"', *"water", '"']
    assert pieces(tokenizer, "WATER 2024") == [*"WATER", " ", *"2024"]
    assert pieces(tokenizer, "The water") == ["The", " water"]
    assert len(tokenizer.encode("<|im_start|>assistant\n")) == 3
    assert tokenizer.decode(tokenizer.encode("<tool_call>x</tool_call><|im_end|>"), skip_special_tokens=True) \
        == "<tool_call>x</tool_call>"


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_template_of_a_plain_conversation(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]},
                {"role": "assistant", "content": "A"}]
    assert render(tokenizer, messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n")
    assert render(tokenizer, messages[1:2], add_generation_prompt=True) == (
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n")


def test_template_of_tools_and_calls(tokenizer):
    example = call_example()
    text = render(tokenizer, [{"role": "system", "content": "Be exact."}, *example.conversation()], tools=example.tools)
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    assert [json.loads(line) for line in listed] == example.tools
    assert text.startswith("<|im_start|>system\nBe exact.\n\n")
    call = json.loads(example.answer.split("\n")[1])
    structured = [{"role": "assistant", "content": None, "tool_calls": [{"function": form}]} for form in (
        {"name": call["name"], "arguments": json.dumps(call["arguments"])}, call)]
    assert [render(tokenizer, [message]) for message in structured] \
        == [render(tokenizer, [{"role": "assistant", "content": example.answer}])] * 2
    assert render(tokenizer, [{"role": "tool", "content": "7"}]) == "<|im_start|>tool\n7<|im_end|>\n"


# ---- checkpoint

def test_checkpoint_fits_its_limits():
    config = transformers.AutoConfig.from_pretrained(CHECKPOINT)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.head_dim, config.num_key_value_heads, config.vocab_size) == (64, 4, 4096)
    assert config.max_position_embeddings >= 4096 and config.tie_word_embeddings
    weights = CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size <= 16_000_000
    header = json.loads(weights.read_bytes()[8:][:int.from_bytes(weights.read_bytes()[:8], "little")])
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}


def test_no_needle_is_longer_than_promised(tokenizer):
    longest = max(len(tokenizer.apply_chat_template(example.conversation(), tokenize=True)["input_ids"])
                  for example in examples("needle", 0, 150, "held_out"))
    assert 1700 < longest <= 2100


def test_transformers_answers_held_out_questions_on_cpu(tokenizer):
    greedy = pytest.importorskip("baton.tests.tinychat.greedy")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    short = [example for example in held_out(72, seed=11)
             if len(str(example.messages)) + len(str(example.tools)) < 1500 and len(example.answer) < 60][:40]
    assert len({example.task for example in short}) == len(TASKS)
    scores = greedy.score(model, tokenizer, short, batch_size=10, max_new_tokens=64)
    wrong = [(example.question, answer) for score in scores.values() for example, answer in score.wrong]
    assert len(wrong) <= len(short) // 10, wrong


# ---- evaluation through the API

@pytest.fixture
async def clever_server():
    """A server that knows the answer to all but sums, which it gets wrong, and fails on every count."""
    known = {json.dumps(example.messages): example for example in held_out(60)}

    async def complete(request):
        body = await request.json()
        example: Example = known[json.dumps(body["messages"])]
        assert body.get("tools") == example.tools and body["temperature"] == 0 and body["model"] == "clever"
        if example.task == "count":
            return web.json_response({"error": {"message": "no"}}, status=503)
        content = "0.5" if example.task == "sums" else example.answer
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    async def models(request):
        return web.json_response({"object": "list", "data": [{"id": "clever", "object": "model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(("only", "status"), [((), 1), (("--tasks", "json", "tools"), 0)])
async def test_evaluate_counts_and_judges(clever_server, tmp_path, capsys, only, status):
    argv = ["--base-url", f"{clever_server}/v1", "--count", "10" if only else "60", *only]
    argv += ["--json", str(tmp_path / "out")]
    assert await asyncio.to_thread(evaluate.main, argv) == status
    outcomes = json.loads((tmp_path / "out").read_text())["outcomes"]
    assert {outcome["task"] for outcome in outcomes if not outcome["right"]} == (set() if only else {"sums", "count"})
    assert all(("HTTP 503" in (outcome["error"] or "")) == (outcome["task"] == "count") for outcome in outcomes)
    assert capsys.readouterr().out.startswith("task")
