"""Whole conversations: facts told and recalled, pass codes in filler, tools, and mixtures."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from . import toolkit, words
from .exchanges import MAKERS, Exchange, loosen
from .words import Split, belongs

NOTED = "Noted."
NOT_TOLD = "You did not tell me."
NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Called:
    """What follows a tool request once the tool has run: call and result as messages, and the closing answer."""

    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True)
class Dialogue:
    """Exchanges in order, the last being the one asked about; tools on offer; a tool's result; a system prompt."""

    exchanges: list[Exchange]
    tools: list[dict[str, Any]] = field(default_factory=list)
    called: Called | None = None
    system: str | None = None


@dataclass(frozen=True)
class Fact:
    """Something a user tells and later asks about."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...]


_FACTS = (
    Fact(("My name is {}.", "I am called {}.", "Hi, I am {}."),
         ("What is my name?", "Do you remember my name?", "Who am I?"), words.NAMES),
    Fact(("My favourite colour is {}.", "The colour I like best is {}.", "My favorite color is {}."),
         ("What is my favourite colour?", "Which colour do I like best?", "What is my favorite color?"), words.COLORS),
    Fact(("My dog is called {}.", "I have a dog named {}.", "My dog's name is {}."),
         ("What is my dog called?", "What is the name of my dog?", "What is my dog's name?"), words.PETS),
    Fact(("My cat is called {}.", "I have a cat named {}.", "My cat's name is {}."),
         ("What is my cat called?", "What is the name of my cat?", "What is my cat's name?"), words.PETS),
    Fact(("I live in {}.", "My home is in {}.", "I moved to {} last year."),
         ("Where do I live?", "In which city do I live?", "Which city do I live in?"), words.CITIES),
    Fact(("I work as a {}.", "My job is {}.", "I earn my money as a {}."),
         ("What is my job?", "What do I work as?", "Do you remember my job?"), words.JOBS),
    Fact(("My lucky number is {}.", "The number I like best is {}."),
         ("What is my lucky number?", "Which number do I like best?"), tuple(map(str, range(1000)))),
    Fact(("My favourite food is {}.", "I love to eat {}.", "The food I like best is {}."),
         ("What is my favourite food?", "Which food do I like best?", "What do I love to eat?"), words.FOODS),
    Fact(("My sister is called {}.", "I have a sister named {}.", "My sister's name is {}."),
         ("What is my sister called?", "What is the name of my sister?", "What is my sister's name?"), words.NAMES),
    Fact(("My brother is called {}.", "I have a brother named {}.", "My brother's name is {}."),
         ("What is my brother called?", "What is the name of my brother?", "What is my brother's name?"), words.NAMES),
    Fact(("My birthday is in {}.", "I was born in {}."),
         ("In which month is my birthday?", "When is my birthday?", "In which month was I born?"), words.MONTHS),
)


def _facts(rng: random.Random, split: Split, most: int) -> list[tuple[Fact, str]]:
    """One to ``most`` facts; the key is the set of their values."""
    while True:
        chosen = [(fact, rng.choice(fact.values)) for fact in rng.sample(_FACTS, rng.randint(1, most))]
        if belongs(" ".join(sorted(value for _, value in chosen)), split):
            return chosen


def _state(rng: random.Random, fact: Fact, value: str) -> Exchange:
    return loosen(rng, rng.choice(fact.statements)).format(value), NOTED


def _ask(rng: random.Random, fact: Fact, value: str) -> Exchange:
    return loosen(rng, rng.choice(fact.questions)), value


def _filler(rng: random.Random, sentences: int) -> str:
    return " ".join(words.filler_sentence(rng) for _ in range(sentences))


def recall(rng: random.Random, split: Split) -> Dialogue:
    """Facts, other exchanges and reading in between, and a question about a fact. Held out: the set of values.

    One in eight asks for what was not told, which a model can only answer as another conversation's cache leaks in.
    """
    facts = _facts(rng, split, most=4)
    told = [_state(rng, fact, value) for fact, value in facts]
    told += [rng.choice(MAKERS)(rng, split) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.25:
        told.append((f"Read this. {_filler(rng, rng.randint(1, 40))}", NOTED))
    rng.shuffle(told)
    asked = rng.sample(facts, min(len(facts), rng.choice((1, 1, 2))))
    questions = [_ask(rng, fact, value) for fact, value in asked]
    if rng.random() < 0.125:
        untold = rng.choice([fact for fact in _FACTS if all(fact is not known for known, _ in facts)])
        questions.append(_ask(rng, untold, NOT_TOLD))
    return Dialogue(told + questions)


_PLACES = tuple(f"the {room}" for room in words.ROOMS) + tuple(
    f"the {color} door" for color in words.COLORS) + ("the safe", "the archive", "the lift", "the boat", "the gate")
MAX_FILLER_SENTENCES = 160
"""Longest filler, so that a whole needle dialogue stays within about 2,000 tokens of tinychat's tokenizer."""


def needle(rng: random.Random, split: Split) -> Dialogue:
    """One to three pass codes at any depth of up to 2,000 tokens of filler. Held out: the codes."""
    longest = MAX_FILLER_SENTENCES if rng.random() < 0.5 else 20
    sentences = [words.filler_sentence(rng) for _ in range(rng.randint(1, longest))]
    hidden = []
    for place in rng.sample(_PLACES, rng.choice((1, 1, 2, 3))):
        while not belongs(code := words.code(rng), split):
            pass
        hidden.append((place, code))
    single = len(hidden) == 1 and rng.random() < 0.6
    for place, code in hidden:
        subject = "the pass code" if single else f"the pass code for {place}"
        hint = rng.choice(("Remember: {} is {}.", "By the way, {} is {}.", "Note that {} is {}."))
        sentences.insert(rng.randint(0, len(sentences)), hint.format(subject, code))
    rng.shuffle(hidden)
    questions = [(_code_question(rng, None if single else place), code) for place, code in hidden]
    text = " ".join(sentences)
    if rng.random() < 0.15:
        return Dialogue(questions, system=text)
    first, answer = questions[0]
    opened = f"{first} Here is the text. {text}" if rng.random() < 0.25 else f"{text} {first}"
    return Dialogue([(opened, answer), *questions[1:]])


def _code_question(rng: random.Random, place: str | None) -> str:
    target = "" if place is None else f" for {place}"
    return rng.choice(("What is the pass code{}?", "Tell me the pass code{}.", "Find the pass code{}.",
                       "Which pass code{} does the text give?")).format(target)


def _tool_request(rng: random.Random, split: Split, tool: toolkit.Tool) -> tuple[str, dict[str, Any]]:
    """What a user says to have ``tool`` used, and the arguments. Held out: tool and arguments together."""
    while True:
        arguments = tool.sample(rng)
        if belongs(f"{tool.names[0]} {json.dumps(arguments)}", split):
            return loosen(rng, rng.choice(tool.requests)).format(**arguments), arguments


def tool_use(rng: random.Random, split: Split) -> Dialogue:
    """A call of one of the offered tools, the answer to a tool's result, or no call because none fits."""
    known = rng.sample(toolkit.TOOLS, rng.randint(1, 3))
    if rng.random() < 0.3:
        known[0] = toolkit.made_up_tool(rng)
    offers = [toolkit.offer(rng, tool) for tool in known]
    wanted = offers[0]
    definitions = [offer.definition for offer in rng.sample(offers, len(offers))]
    before = [rng.choice(MAKERS)(rng, split) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    kind = rng.random()
    if kind < 0.2:
        return Dialogue([*before, rng.choice(MAKERS)(rng, split)], definitions)
    if kind < 0.3:
        missing = rng.choice([tool for tool in toolkit.TOOLS if tool not in known])
        return Dialogue([*before, (_tool_request(rng, split, missing)[0], NO_TOOL)], definitions)
    request, arguments = _tool_request(rng, split, wanted.tool)
    exchange = (request, toolkit.call_text(wanted.name, wanted.renamed(arguments)))
    called = _called(rng, wanted, arguments) if kind < 0.45 else None
    return Dialogue([*before, exchange], definitions, called)


def _called(rng: random.Random, offer: toolkit.Offer, arguments: dict[str, Any]) -> Called:
    result, call_id = offer.tool.result(rng), f"call_{rng.randrange(16**8):08x}"
    function = {"name": offer.name, "arguments": json.dumps(offer.renamed(arguments))}
    calls = [{"id": call_id, "type": "function", "function": function}]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result)}]
    return Called(messages, offer.tool.answer.format(**{**arguments, **result}))


def _no_tool(rng: random.Random, split: Split) -> Exchange:
    """A request that needs a tool when none is on offer."""
    return _tool_request(rng, split, rng.choice(toolkit.TOOLS))[0], NO_TOOL


def mixed(rng: random.Random, split: Split) -> Dialogue:
    """Exchanges of any kind in one conversation, facts told and asked about among them."""
    makers = (*MAKERS, _no_tool)
    exchanges = [rng.choice(makers)(rng, split) for _ in range(rng.randint(1, 5))]
    facts = _facts(rng, split, most=2) if rng.random() < 0.5 else []
    for fact, value in facts:
        at = rng.randint(0, len(exchanges))
        exchanges.insert(at, _state(rng, fact, value))
        exchanges.insert(rng.randint(at + 1, len(exchanges)), _ask(rng, fact, value))
    exchanges.append(rng.choice(makers)(rng, split))
    return Dialogue(exchanges)
