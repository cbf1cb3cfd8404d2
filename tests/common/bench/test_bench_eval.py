"""bench_eval: its readers of public formats, its prompts and scores, and runs against a server that answers by rule."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from baton.common.api.errors import ConfigError
from baton.common.bench import evaluation
from baton.common.bench.exams.exam import EXAMS
from baton.common.bench.exams.numbers import number_in
from baton.common.bench.exams.prompts import chat_prompt, plain_prompt, scored_choices
from baton.common.tokenizer.tokenizer import load_tokenizer
from baton.tests.tinychat import exam

# ---------------------------------------------------------------------- files


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def read(task, path, shots_path=None, num_shots=0, *, cloze=False):
    return EXAMS.get(task)().read(str(path), shots_path, num_shots, cloze=cloze)


@pytest.fixture
def mmlu(tmp_path):
    write(tmp_path / "mmlu/dev/high_school_art_dev.csv", 'Shot?,a,b,c,d,A\n"Two,\nlines?",e,f,g,h,C\n')
    write(tmp_path / "mmlu/test/high_school_art_test.csv", "Who?,one,two,three,four,B\n")
    write(tmp_path / "mmlu/dev/law_dev.csv", "L?,a,b,c,d,D\nM?,a,b,c,d,D\n")
    write(tmp_path / "mmlu/test/law_test.csv", "N?,k,l,m,n,A\nO?,k,l,m,n,B\n")
    return tmp_path / "mmlu"


def test_mmlu_asks_for_letters_after_its_subject_s_examples(mmlu):
    art, law, _ = read("mmlu", mmlu, num_shots=2)
    assert plain_prompt(art) == (
        "The following are multiple choice questions (with answers) about high school art.\n\n"
        "Shot?\nA. a\nB. b\nC. c\nD. d\nAnswer: A\n\nTwo,\nlines?\nA. e\nB. f\nC. g\nD. h\nAnswer: C\n\n"
        "Who?\nA. one\nB. two\nC. three\nD. four\nAnswer:")
    assert art.question.choices == (" A", " B", " C", " D") and art.question.right == " B"
    assert law.question.group == "law" and [shot.asked[0] for shot in law.shots] == ["L", "M"]


def test_cloze_asks_for_the_choice_s_text(mmlu):
    art = read("mmlu", mmlu, cloze=True)[0]
    assert plain_prompt(art) == "Who?" and art.question.right == " two" and art.question.choices[3] == " four"


def test_mmlu_in_one_file_may_have_a_header(tmp_path):
    path = write(tmp_path / "all.csv", ",Question,A,B,C,D,Answer,Subject\n0,Q?,a,b,c,d,C,law\n1,R?,a,b,c,d,D,art\n")
    assert [(each.question.group, each.question.right) for each in read("mmlu", path)] == [("law", " C"), ("art", " D")]
    first, second = read("mmlu", path, num_shots=1)[0], read("mmlu", path, path, 1)
    assert first.question.group == "art" and first.shots[0].group == "law" and len(second) == 2


def test_gsm8k_s_answer_is_a_number(tmp_path):
    path = write(tmp_path / "test.jsonl", "\n".join(json.dumps({"question": q, "answer": a}) for q, a in (
        ("Shot?", "Half of 6.\n#### 3"), ("Real?", "It is 1,200.\n#### 1,200"))))
    (asked,) = read("gsm8k", path, num_shots=1)
    assert plain_prompt(asked) == "Question: Shot?\nAnswer: Half of 6.\n#### 3\n\nQuestion: Real?\nAnswer:"
    assert asked.question.right == "1200" and not asked.question.choices
    assert len(read("gsm8k", path, path, 2)) == 2


@pytest.mark.parametrize("text, number", [
    ("It costs $1,234.50, so #### 12 apples 3", "12"), ("first 4, then 5.", "5"), ("-3.0", "-3"), ("0.50", "0.5"),
    ("#### none", None), ("100", "100"), ("", None)])
def test_numbers_in_answers(text, number):
    assert number_in(text) == number


def test_hellaswag_continues_a_text(tmp_path):
    path = write(tmp_path / "val.jsonl", "\n".join(map(json.dumps, (
        {"ctx_a": "A man [x]  runs.", "ctx_b": "he", "activity_label": "Sport", "endings": ["falls", "wins"],
         "label": "1"},
        {"ctx": "How to swim [title] Go in.", "endings": ["[step] Swim.", "Fly."], "label": 0}))))
    first, second = read("hellaswag", path)
    assert (first.question.asked, first.question.right) == ("Sport: A man runs. He", " wins")
    assert (second.question.asked, second.question.choices) == ("How to swim. Go in.", (" Swim.", " Fly."))
    (asked,) = read("hellaswag", path, num_shots=1)
    assert plain_prompt(asked) == "Sport: A man runs. He wins\n\nHow to swim. Go in."


@pytest.mark.parametrize("task, text, options, words", [
    ("mmlu", "Who?,a,b,c,d,E\n", {}, "Row 1"), ("mmlu", "Question,A,Answer\nx,y,A\n", {}, "Row 2"),
    ("mmlu", "Who?,a,b,c,d,A\n", {"num_shots": 2}, "holds 1 examples, too few for --num-shots 2"),
    ("mmlu", "Who?,a,b,c,d,A\n", {"num_shots": 1}, "no questions besides the examples"),
    ("gsm8k", "{", {}, "cannot be read"), ("gsm8k", "3", {}, "JSON object"), ("gsm8k", "{}", {}, "Line 1"),
    ("gsm8k", '{"question": "a", "answer": "5"}', {}, "####"), ("gsm8k", "", {"cloze": True}, "--cloze"),
    ("hellaswag", '{"ctx": "a", "endings": ["b"], "label": ""}', {}, "validation file"),
    ("hellaswag", "", {"cloze": True}, "--cloze")])
def test_files_that_are_no_exam_are_sentences(tmp_path, task, text, options, words):
    with pytest.raises(ConfigError, match=words):
        read(task, write(tmp_path / "file", text), **options)


def test_files_that_are_not_there_are_sentences(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read("gsm8k", tmp_path / "none")
    with pytest.raises(ConfigError, match="SUBJECT_test.csv"):
        read("mmlu", tmp_path)


def test_tinychat_s_exam_is_what_its_tasks_make():
    assert {str(path.relative_to(exam.FOLDER)): path.read_text() for path in exam.FOLDER.rglob("*.*")} == exam.files()


# ---------------------------------------------------------------------- prompts


class Letters:
    """A tokenizer of characters that joins ``e `` to one token."""

    special_ids = frozenset()

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(c) for c in text.replace("e ", "\x01")]


def test_all_choices_are_scored_from_the_first_token_that_one_changes():
    one, two = scored_choices("abe", [" cd", "f"], Letters(), chat=False)
    assert one.ids == [0, ord("a"), ord("b"), 1, ord("c"), ord("d")] and (one.start, one.num_bytes) == (3, 3)
    assert two.ids[3:] == [ord("e"), ord("f")] and (two.start, two.num_bytes) == (3, 1)
    chat, _ = scored_choices("ab", [" cä", " f"], Letters(), chat=True)
    assert chat.ids == [ord(c) for c in "abcä"] and (chat.start, chat.num_bytes) == (2, 3)


def test_a_chat_has_its_examples_as_turns(mmlu):
    tokenizer = load_tokenizer("tinychat")
    prompt = chat_prompt(read("mmlu", mmlu, num_shots=2)[0], tokenizer)
    places = [prompt.index(text) for text in (
        "about high school art.", "Shot?", "<|im_start|>assistant\nA<|im_end|>", "lines?", "Who?")]
    assert places == sorted(places) and prompt.endswith("<|im_start|>assistant\n")


# ---------------------------------------------------------------------- runs


class Stub(http.server.ThreadingHTTPServer):
    """Answers 7 to all questions in words, and likes choices that begin with a token of ``liked``."""

    daemon_threads = True
    liked: tuple[int, ...] = ()
    status = 200
    starting = 0
    null = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/health" and self.server.starting:
            self.server.starting -= 1
            self._answer({"status": "starting"}, 503)
            return
        self._answer({"data": [{"id": "m"}], "tokenizer_path": "tinychat"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        meta = {"completion_tokens": 2}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            meta["input_token_logprobs"] = [[None, body["input_ids"][start], None]] + [
                [None if self.server.null else -0.5 if token in self.server.liked else -1.0, token, None]
                for token in body["input_ids"][start + 1:]]
        self._answer({"text": "Seven.\n#### 7", "meta_info": meta}, self.server.status)

    def _answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def stub():
    with Stub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def bench(stub, *flags):
    with pytest.raises(SystemExit) as exit:
        evaluation.main(["--base-url", stub.url, "--disable-progress", *map(str, flags)])
    return exit.value.code


def test_a_run_counts_right_letters_by_subject(stub, mmlu, tmp_path, capsys):
    stub.liked = (load_tokenizer("tinychat").encode(" A", add_special_tokens=False)[-1],)
    output = tmp_path / "out.jsonl"
    assert bench(stub, "--task", "mmlu", "--data-path", mmlu, "--num-shots", 1, "--output-file", output,
                 "--output-details", "--threshold", 0.3) == 0
    record = json.loads(output.read_text())
    assert record["accuracy"] == pytest.approx(1 / 3) and record["num_requests"] == 3 and record["failed"] == 0
    assert record["groups"] == {"high_school_art": {"accuracy": 0, "num_questions": 1},
                                "law": {"accuracy": 0.5, "num_questions": 2}}
    assert [answer["answer"] for answer in record["answers"]] == [" A"] * 3
    assert record["other"] == {"num_questions": 3, "parallel": 64, "num_shots": 1}
    told = capsys.readouterr().out
    assert "1 / 3" in told and "33.33%" in told and "law" in told
    assert len(stub.bodies) == 12 and all(body["sampling_params"]["max_new_tokens"] == 0 for body in stub.bodies)
    assert bench(stub, "--task", "mmlu", "--data-path", mmlu, "--num-shots", 0, "--threshold", 0.5) == 1


def test_a_run_reads_generated_numbers(stub, tmp_path):
    stub.starting = 1
    lines = [json.dumps({"question": "How many?", "answer": f"#### {n}"}) for n in (1, 7, 7, 8)]
    path, output = write(tmp_path / "test.jsonl", "\n".join(lines)), tmp_path / "out.jsonl"
    assert bench(stub, "--task", "gsm8k", "--data-path", path, "--num-shots", 1, "--num-questions", 2, "--parallel", 1,
                 "--result-file", output) == 0
    record = json.loads(output.read_text())
    assert stub.starting == 0, "the server is awaited until it is healthy"
    assert record["accuracy"] == 1 and record["num_requests"] == 2 and record["output_throughput"] > 0
    assert [body["sampling_params"]["stop"] for body in stub.bodies] == [["Question:"]] * 2
    bench(stub, "--task", "gsm8k", "--data-path", path, "--num-shots", 0, "--apply-chat-template")
    assert "stop" not in stub.bodies[-1]["sampling_params"]
    asked = load_tokenizer("tinychat").decode(stub.bodies[-1]["input_ids"], skip_special_tokens=False)
    assert "How many?<|im_end|>" in asked and "Question:" not in asked


def test_failures_are_wrong_answers_and_reported(stub, mmlu, capsys):
    stub.status = 503
    assert bench(stub, "--task", "mmlu", "--data-path", mmlu, "--num-shots", 0) == 1
    assert "3 requests failed" in (told := capsys.readouterr().out) and "first HTTP 503" in told
    stub.status, stub.null = 200, True
    assert bench(stub, "--task", "mmlu", "--data-path", mmlu, "--num-shots", 0) == 1
    assert "no log-probability of 1 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [
    (["--num-shots", "-1"], "--num-shots"), (["--parallel", "0"], "--parallel"), (["--threshold", "2"], "--threshold"),
    (["--output-details"], "--output-file"), (["--backend", "vllm"], "it speaks /generate")])
def test_arguments_that_make_no_sense_are_sentences(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        evaluation.main(["--task", "gsm8k", "--data-path", "x", *flags])
    assert exit.value.code == 2 and words in capsys.readouterr().err
