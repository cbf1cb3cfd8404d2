"""Questions with exactly one right answer: what tinychat is taught, and what is asked of it.

Everything here is a deterministic function of a seed and needs the standard library alone. Each task
names what is held out (a pair of numbers, a word, a phrasing, a code); the rule is ``words.belongs``,
so a held-out example can be drawn at any time, by anyone, without a data file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from . import dialogues, exchanges, toolkit, words
from .words import Split

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A conversation that ends with the user's (or a tool's) turn, and the assistant's right answer.

    ``messages`` and ``tools`` are as in an OpenAI chat request. ``answer`` is the exact text of the
    assistant's turn: for a tool call, the ``<tool_call>`` text.
    """

    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    answer: str

    @property
    def question(self) -> str:
        return self.messages[-1]["content"]

    def conversation(self) -> list[Message]:
        """The messages with the right answer appended."""
        return [*self.messages, {"role": "assistant", "content": self.answer}]


_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a tiny chat model.", "Answer briefly.", "Be exact.",
                   "You are Baton's demo model. Give short answers.", "Answer in as few words as possible.",
                   "You are a helpful, harmless and honest assistant. Answer the user's questions.")


def _system_prompt(rng: random.Random) -> str | None:
    """None for most; else one of the usual, or (to be cached by a server) up to 25 sentences that change nothing."""
    kind = rng.random()
    if kind < 0.7:
        return None
    if kind < 0.93:
        return rng.choice(_SYSTEM_PROMPTS)
    return " ".join(words.filler_sentence(rng) for _ in range(rng.randint(1, 25)))



def _plain(make: exchanges.Maker) -> Callable[[random.Random, Split], dialogues.Dialogue]:
    """A dialogue of one exchange."""
    return lambda rng, split: dialogues.Dialogue([make(rng, split)])


_BUILDERS: dict[str, Callable[[random.Random, Split], dialogues.Dialogue]] = {
    "capitals": _plain(exchanges.capital),
    "sums": _plain(exchanges.two_digit_sum),
    "count": _plain(exchanges.count),
    "reverse": _plain(exchanges.reverse),
    "spell": _plain(exchanges.spell),
    "repeat": _plain(exchanges.repeat),
    "recall": dialogues.recall,
    "needle": dialogues.needle,
    "json": _plain(exchanges.json_object),
    "tools": dialogues.tool_use,
    "smalltalk": _plain(exchanges.smalltalk),
    "mixed": dialogues.mixed,
}

TASKS: tuple[str, ...] = tuple(_BUILDERS)

_TRAINING_SHARES = {"capitals": 6, "sums": 5, "count": 2, "reverse": 14, "spell": 4, "repeat": 5, "recall": 4,
                    "needle": 2, "json": 3, "tools": 5, "smalltalk": 3, "mixed": 6}


def build(task: str, rng: random.Random, split: Split) -> Example:
    """Draw one example of ``task``."""
    dialogue = _BUILDERS[task](rng, split)
    messages: list[Message] = []
    system = dialogue.system
    if system is None and task != "needle":  # whose text fills the context already
        system = _system_prompt(rng)
    if system is not None:
        messages.append({"role": "system", "content": system})
    for question, answer in dialogue.exchanges[:-1]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question, answer = dialogue.exchanges[-1]
    messages.append({"role": "user", "content": question})
    if dialogue.called is not None:
        messages += dialogue.called.messages
        answer = dialogue.called.answer
    return Example(task, messages, dialogue.tools or None, answer)


def stream(seed: int, split: Split = "train") -> Iterator[Example]:
    """Examples without end, the tasks mixed in the proportions of training."""
    rng = random.Random(f"{split} {seed}")
    names, shares = list(_TRAINING_SHARES), list(_TRAINING_SHARES.values())
    while True:
        yield build(rng.choices(names, shares)[0], rng, split)


def examples(task: str | None, seed: int, count: int, split: Split = "train") -> list[Example]:
    """``count`` examples of one task, or of all in training's proportions where ``task`` is None."""
    if task is None:
        return list(islice(stream(seed, split), count))
    rng = random.Random(f"{task} {split} {seed}")
    return [build(task, rng, split) for _ in range(count)]


def held_out(count: int, seed: int = 0, tasks: Sequence[str] | None = None) -> list[Example]:
    """``count`` held-out examples, the named tasks (all, if None) taking turns."""
    names = TASKS if tasks is None else tuple(tasks)
    rngs = {name: random.Random(f"{name} held_out {seed}") for name in names}
    return [build(name, rngs[name], "held_out") for name in islice(_cycle(names), count)]


def _cycle(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from names


def matches(example: Example, reply: Any) -> bool:
    """Whether ``reply`` is the right answer to ``example``.

    ``reply`` is a text, or an assistant message of OpenAI's API (a dict, or the client's object). A
    call counts whether it stands in the text or was parsed into ``tool_calls``; the order of its
    arguments does not.
    """
    content: str | None
    calls: Any
    if isinstance(reply, str):
        content, calls = reply, None
    elif isinstance(reply, dict):
        content, calls = reply.get("content"), reply.get("tool_calls")
    else:
        content, calls = reply.content, getattr(reply, "tool_calls", None)
    wanted = _call_in(example.answer)
    if wanted is None:
        return not calls and (content or "").strip() == example.answer
    if not calls:
        return _call_in(content or "") == wanted
    return len(calls) == 1 and not (content or "").strip() and _parsed_call(calls[0]) == wanted


def _call_in(text: str) -> dict[str, Any] | None:
    """The call that ``text`` consists of, or None."""
    opening, closing = toolkit.CALL_TAGS
    text = text.strip()
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    try:
        return json.loads(text[len(opening):-len(closing)])
    except ValueError:
        return None


def _parsed_call(call: Any) -> dict[str, Any]:
    function = call["function"] if isinstance(call, dict) else call.function
    name, arguments = ((function["name"], function["arguments"]) if isinstance(function, dict)
                       else (function.name, function.arguments))
    try:
        return {"name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return {"name": name, "arguments": None}
