"""Programs over a backend that answers from a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import baton.lang as sgl
from baton.lang.backends.base import Answer, Prompt
from baton.lang.chat_template import TEMPLATES
from baton.lang.choices import Decision
from baton.lang.sampling import SamplingParams


class Script:
    """Answers a prompt's last line with ``<line>``; keeps prompts and parameters."""

    def __init__(self, template: str = "chatml"):
        self.template = TEMPLATES[template]
        self.prompts: list[Prompt] = []
        self.params: list[SamplingParams] = []
        self.cached: list[str] = []
        self.together: threading.Barrier | None = None

    def chat_template(self):
        return self.template

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer:
        self.prompts.append(prompt)
        self.params.append(params)
        if self.together:
            self.together.wait(10)
        text = f"<{prompt.text.splitlines()[-1]}>"
        if "fail" in text:
            raise sgl.BackendError("The server is on fire.", 500)
        return Answer([text] * params.n if params.n else text, {"length": len(prompt.text)})

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        for letter in str(self.generate(prompt, params).text):
            yield Answer(letter, {"letter": letter})

    def select(self, prompt, choices, method) -> Decision:
        return Decision(choices[-1], {"method": method.name})

    def cache_prefix(self, text: str) -> None:
        self.cached.append(text)


@pytest.fixture
def script() -> Script:
    return Script()


def run(script, func, *args: Any, **kwargs: Any) -> sgl.ProgramState:
    return sgl.function(func).run(*args, backend=script, **kwargs)


def test_turns_of_a_dialogue(script):
    def dialogue(s, first, second):
        s += sgl.system("Be brief.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("one", max_tokens=5))
        s += sgl.user(second)
        s += sgl.assistant("I say: " + sgl.gen("two") + "!")
        return "returned"

    state = run(script, dialogue, "Hi", second="More", temperature=0.5)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": state["one"]}, {"role": "user", "content": "More"},
        {"role": "assistant", "content": f"I say: {state['two']}!"}]
    assert state.text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                                   "<|im_start|>assistant\n<<|im_start|>assistant>")
    assert script.prompts[1].turn == "I say: " and script.prompts[1].role == "assistant"
    assert [each.max_new_tokens for each in script.params] == [5, 128]
    assert script.params[0].temperature == 0.5 and script.params[0].stop == ["<|im_end|>"]
    assert state.ret_value == "returned" and state.error() is None
    assert state.get_meta_info("one") == {"length": len(script.prompts[0].text)} and "two" in state


def test_scopes_variables_and_open_turns(script):
    def program(s):
        s += s.system("S")
        with s.user():
            s += "Question"
        s += sgl.assistant_begin()
        with s.var_scope("whole"):
            s += "Answer: " + sgl.gen("part") + "."
        s += sgl.assistant_end()
        s["mine"] = 3
        s.set_var("other", s["part"])

    state = run(script, program)
    assert state["whole"] == f"Answer: {state['part']}." and state["mine"] == 3 and state["other"] == state["part"]
    assert [each["content"] for each in state.messages()] == ["S", "Question", state["whole"]]
    assert "none" not in state and state.get_meta_info("whole") is None
    with pytest.raises(KeyError):
        state["none"]


def test_control_flow_follows_choices(script):
    @sgl.function
    def tool_use(s, question):
        s += "To answer this question: " + question + ". "
        s += "I need a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ".\n"
        if s["tool"] == "search engine":
            s += sgl.select("word", ["a", "b"], choices_method=sgl.greedy_token_selection)

    state = tool_use("What?", backend=script)
    assert state.text() == "To answer this question: What?. I need a search engine.\nb"
    assert state.get_meta_info("word") == {"method": "greedy_token_selection"}


def test_forks_run_at_the_same_time_and_share_a_prefix(script):
    script.together = threading.Barrier(3)

    def tips(s):
        s += "Tips.\n"
        forks = s.fork(3)
        for number, fork in enumerate(forks):
            fork += f"Tip {number}:\n" + sgl.gen("tip")
        for number in range(3):
            s += forks[number]["tip"] + "\n"

    assert run(script, tips).text() == "Tips.\n<Tip 0:>\n<Tip 1:>\n<Tip 2:>\n"
    assert script.cached == ["Tips.\n"]


@pytest.mark.parametrize("mode, text, gathered", [("gather_variable", "P\n", ["<0>", "<1>"]),
                                                  ("concate_and_append", "P\n0\n<0>1\n<1>", None)])
def test_join(script, mode, text, gathered):
    def program(s):
        s += "P\n"
        forks = s.fork(2)
        forks += ["0\n", "1\n"]
        forks += sgl.gen("x")
        forks += lambda index: ""
        forks.join(mode)

    state = run(script, program)
    assert state.text() == text and (state["x"] if gathered else None) == gathered


def test_copies_leave_the_text_alone(script):
    def program(s):
        s += "P\n"
        with s.copy() as other:
            other += sgl.gen("x")

    state = run(script, program)
    assert state.text() == "P\n" and state["x"] == ["<P>"] and script.cached == []


def test_batches_keep_their_order(script, capsys):
    @sgl.function
    def qa(s, question, end="?"):
        s += question + end + "\n" + sgl.gen("answer", n=2)

    states = qa.run_batch([{"question": "a"}, {"question": "b", "end": "!"}, ["fail"], ("d", ".")], backend=script,
                          max_new_tokens=7, progress_bar=True)
    assert [states[index]["answer"] for index in (0, 1, 3)] == [["<a?>"] * 2, ["<b!>"] * 2, ["<d.>"] * 2]
    assert states[0].text() == "a?\n<a?>" and {each.max_new_tokens for each in script.params} == {7}
    assert str(states[2].error()) == "The server is on fire." and "4/4 programs\n" in capsys.readouterr().err
    assert [each["answer"][0] for each in qa.bind(end=";").run_batch([["x"]], backend=script, generator_style=True)
            ] == ["<x;>"]
    assert qa.run_batch([], backend=script) == []


def test_streams(script):
    @sgl.function
    def qa(s, question):
        s += "Q: " + question + "\n" + sgl.gen("answer") + "\nend\n" + sgl.gen("more")

    state = qa.run("x", stream=True, backend=script)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == "Q: x\n<Q: x>\nend\n<end>"
    assert "".join(qa.run("x", stream=True, backend=script).text_iter("more")) == "<end>"
    assert list(qa.run("x", backend=script).text_iter("answer")) == ["<Q: x>"]
    failed = qa.run("fail", stream=True, backend=script)
    assert qa.run("y", stream=True, backend=script)["more"] == "<end>"
    with pytest.raises(sgl.BackendError, match="on fire"):
        list(failed.text_iter("answer"))


async def test_asynchronous_streams(script):
    def qa(s):
        s += "Q\n" + sgl.gen("answer")

    found = [item async for item in run(script, qa, stream=True).text_async_iter("answer", return_meta_data=True)]
    assert "".join(piece for piece, _ in found) == "<Q>" and found[-1][1] == {"letter": ">"}
    assert [piece async for piece in run(script, qa).text_async_iter()] == ["Q\n<Q>"]


def test_errors_reach_readers(script):
    def program(s):
        s += "fail\n" + sgl.gen("x") + sgl.gen("y")

    state = run(script, program)
    for read in (lambda: state["y"], state.text, state.messages, state.sync, lambda: state.get_meta_info("x")):
        with pytest.raises(sgl.BackendError, match="on fire"):
            read()
    assert state.error().status == 500

    def again(s):
        s += "a\n" + sgl.gen("x")
        s += "\nfail\n" + sgl.gen("x")

    with pytest.raises(sgl.BackendError, match="on fire"):
        run(script, again)["x"]

    def raises(s):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(script, raises)
    assert isinstance(run(script, raises, stream=True).error(), LookupError)


@pytest.mark.parametrize("append, message", [
    (lambda s: sgl.user(sgl.image("cat.png")), "image is not supported"),
    (lambda s: sgl.video("cat.mp4", 3), "video is not supported"),
    (lambda s: sgl.user(sgl.assistant("x")), "turn of assistant begins within one of user"),
    (lambda s: sgl.user_end(), "turn of user ends where none is open"),
])
def test_what_cannot_be_executed_is_said(script, append, message):
    def program(s):
        s += append(s)

    with pytest.raises(sgl.ProgramError, match=message):
        run(script, program).text()


@pytest.mark.parametrize("wrong, message", [
    (lambda: sgl.gen("x", regex="("), "is not valid"),
    (lambda: sgl.select("x", []), "needs choices"),
    (lambda: sgl.gen("x", choices=["a"], temperature=1), "most likely choice"),
    (lambda: "a" + sgl.gen("x") + None, "not NoneType"),
    (lambda: sgl.function(lambda: None), "first parameter"),
    (lambda: sgl.function(num_api_spec_tokens=8), "num_api_spec_tokens"),
    (lambda: sgl.function(lambda s: None).bind(x=1), "no parameter x"),
    (lambda: sgl.function(lambda s: None).run_batch(["ab"], backend=Script()), "run_batch takes"),
    (lambda: sgl.function(lambda s: None).run_batch([], backend=Script(), warmth=1), "no parameter warmth"),
    (lambda: sgl.function(lambda s: s.fork(2, [1])).run(backend=Script()), "position_ids_offset"),
    (lambda: sgl.function(lambda s: s.fork(2).join("x")).run(backend=Script()), "no mode x"),
    (lambda: sgl.function(lambda s: s.fork(2).__setitem__(0, s)).run(backend=Script()), "cannot be replaced"),
])
def test_wrong_programs_are_refused(wrong, message):
    with pytest.raises(sgl.ProgramError, match=message):
        wrong()


def test_a_state_is_closed_after_its_program(script):
    state = run(script, lambda s: None)
    with pytest.raises(RuntimeError, match="has ended"):
        state += "more"
    assert script.prompts == []


def test_the_default_backend(script, monkeypatch):
    from baton.lang.backends import default

    monkeypatch.setattr(default, "_CHOSEN", {})
    with pytest.raises(sgl.ProgramError, match="set_default_backend"):
        sgl.function(lambda s: None).run()

    class Holder:
        endpoint = script

    sgl.set_default_backend(Holder())
    assert sgl.function(lambda s: s.__iadd__("a\n" + sgl.gen("x"))).run()["x"] == "<a>"
