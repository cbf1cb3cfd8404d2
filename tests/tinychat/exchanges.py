"""Single exchanges: one thing a user says and the one right answer.

A *maker* draws an exchange of a split. It redraws until its key (what must not be shared between the
splits: a pair of numbers, a word, a phrasing) is in the split; each maker's docstring names the key.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from . import words
from .words import Split, belongs

Exchange = tuple[str, str]
Maker = Callable[[random.Random, Split], Exchange]

UNKNOWN = "I cannot help with that."


def loosen(rng: random.Random, template: str) -> str:
    """Type a template the way people do: now and then without its capital or its last mark."""
    if rng.random() < 0.15 and template[0] != "{":
        template = template[0].lower() + template[1:]
    if rng.random() < 0.15 and template[-1] in ".?":
        template = template[:-1]
    return template


_CAPITAL_OF = (
    "What is the capital of {country}?", "Which city is the capital of {country}?", "Name the capital of {country}.",
    "Tell me the capital of {country}.", "What's the capital of {country}?", "{country}: what is its capital?",
    "Do you know the capital of {country}?", "I need the capital of {country}.", "The capital of {country} is?",
    "Capital of {country}?", "Which city is {country}'s capital?", "Please give me the capital of {country}.",
    "In {country}, which city is the capital?", "Say the capital of {country}.")
_CAPITAL_OF_HELD_OUT = (
    "Can you tell me the capital of {country}?", "What city is the capital of {country}?",
    "Please name the capital of {country}.", "I forgot the capital of {country}. What is it?")
_COUNTRY_OF = ("{city} is the capital of which country?", "Which country has the capital {city}?",
               "Of which country is {city} the capital?", "Name the country whose capital is {city}.")
_COUNTRY_OF_HELD_OUT = ("Tell me the country whose capital is {city}.", "What country has the capital {city}?")


def capital(rng: random.Random, split: Split) -> Exchange:
    """Held out: phrasings. Every country occurs in both splits."""
    country, city = rng.choice(tuple(words.CAPITALS.items()))
    forward = rng.random() < 0.75
    if split == "train":
        template = rng.choice(_CAPITAL_OF if forward else _COUNTRY_OF)
    else:
        template = rng.choice(_CAPITAL_OF_HELD_OUT if forward else _COUNTRY_OF_HELD_OUT)
    return loosen(rng, template).format(country=country, city=city), city if forward else country


_SUMS = ("What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "{a}+{b}", "Add {a} and {b}.",
         "How much is {a} plus {b}?", "Please add {a} to {b}.", "Compute {a} + {b}.", "What do {a} and {b} add up to?",
         "Calculate the sum of {a} and {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}?", "{a} + {b}")


def two_digit_sum(rng: random.Random, split: Split) -> Exchange:
    """Held out: unordered pairs of numbers below 100. Four in five have two digits twice."""
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if belongs(f"{min(a, b)}+{max(a, b)}", split):
            return loosen(rng, rng.choice(_SUMS)).format(a=a, b=b), str(a + b)


_COUNTS = ("Count from {a} to {b}.", "Please count from {a} to {b}.", "Count from {a} up to {b}.",
           "Write the numbers from {a} to {b}.", "List the numbers from {a} to {b}.")


def count(rng: random.Random, split: Split) -> Exchange:
    """The longest answers, of up to 30 numbers. Held out: pairs of ends."""
    while True:
        first = rng.choice((1, rng.randrange(100), rng.randrange(1000)))
        last = first + rng.randint(2, 29)
        if belongs(f"{first} to {last}", split):
            return loosen(rng, rng.choice(_COUNTS)).format(a=first, b=last), " ".join(map(str, range(first, last + 1)))


_REVERSALS = ("Reverse the word {word}.", "Reverse {word}.", "Spell {word} backwards.", "Write {word} backwards.",
              "What is {word} backwards?", "What is {word} spelled backwards?", "Turn the word {word} around.",
              "Please reverse this word: {word}", "Read {word} from right to left.", "Can you reverse {word}?")
_SPELLINGS = ("Spell the word {word}.", "Spell {word}.", "How do you spell {word}?", "Spell this word: {word}",
              "Give me the letters of {word}.")


def reverse(rng: random.Random, split: Split) -> Exchange:
    """Held out: words outside ``words.TAUGHT``. The answer keeps the word's capitals or hyphens."""
    word = words.word_of(rng, split)
    style = rng.choice(("plain", "plain", "quotes", "capitals", "capital", "hyphens"))
    shown, answer = word, word[::-1]
    if style == "quotes":
        shown = f'"{word}"'
    elif style == "capitals":
        shown, answer = word.upper(), answer.upper()
    elif style == "capital":
        shown, answer = word.capitalize(), word.capitalize()[::-1]
    elif style == "hyphens":
        shown, answer = "-".join(word), "-".join(answer)
    return loosen(rng, rng.choice(_REVERSALS)).format(word=shown), answer


def spell(rng: random.Random, split: Split) -> Exchange:
    """Held out: words, the same as for ``reverse``."""
    word = words.word_of(rng, split)
    shown = f'"{word}"' if rng.random() < 0.25 else word
    return loosen(rng, rng.choice(_SPELLINGS)).format(word=shown), "-".join(word)


_REPEATS = ("Repeat after me: {text}", "Repeat: {text}", "Say this: {text}", "Please repeat after me: {text}",
            "Repeat these words: {text}", "Repeat exactly: {text}", "Echo: {text}", "Say: {text}",
            'Repeat "{text}"', 'Say "{text}" back to me.', 'Repeat after me: "{text}"')


def _item(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(words.WORDS)
    if kind < 0.8:
        return words.made_up_word(rng)
    return rng.choice(words.NAMES + words.CITIES) if kind < 0.9 else str(rng.randrange(1000))


def _phrase(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.15:
        return words.filler_sentence(rng)
    parts = [_item(rng) for _ in range(rng.randint(1, rng.choice((4, 8, 24))))]
    return ", ".join(parts) if shape < 0.35 else " ".join(parts)


def repeat(rng: random.Random, split: Split) -> Exchange:
    """Held out: the sequence of words, of up to 24."""
    while not belongs(text := _phrase(rng), split):
        pass
    return rng.choice(_REPEATS).replace("{text}", text), text


_JSON_FIELDS: dict[str, tuple[Callable[[random.Random], Any], str]] = {
    "name": (lambda rng: rng.choice(words.NAMES), "The name is {}."),
    "age": (lambda rng: rng.randint(5, 99), "The age is {} years."),
    "city": (lambda rng: rng.choice(words.CITIES), "The city is {}."),
    "color": (lambda rng: rng.choice(words.COLORS), "The color is {}."),
    "job": (lambda rng: rng.choice(words.JOBS), "The job is {}."),
    "pet": (lambda rng: rng.choice(words.ANIMALS), "The pet is a {}."),
    "food": (lambda rng: rng.choice(words.FOODS), "The food is {}."),
    "month": (lambda rng: rng.choice(words.MONTHS), "The month is {}."),
    "code": (words.code, "The code is {}."),
    "price": (lambda rng: rng.randint(1, 9999), "The price is {}."),
}
_PERSON = "{name} is {age} years old, works as a {job} and lives in {city}."
_JSON_REQUESTS = ("Fill in this JSON object: {empty} {text}", "{text} Fill in this JSON object: {empty}",
                  "{text} Write it as JSON: {empty}", "Complete {empty} from this text: {text}",
                  "Read this: {text} Now complete the JSON {empty}", "{text} JSON: {empty}")


def _filling(rng: random.Random) -> tuple[dict[str, Any], str]:
    """An object, and a text that tells its values in another order."""
    drawn = {key: make(rng) for key, (make, _) in _JSON_FIELDS.items()}
    style = rng.random()
    if style < 0.3:
        keys = rng.sample(("name", "age", "job", "city"), rng.randint(2, 4))
        return {key: drawn[key] for key in keys}, _PERSON.format(**drawn)
    if style < 0.55:
        keys = rng.sample(words.NOUNS, rng.randint(1, 4))
        kinds: tuple[Callable[[random.Random], Any], ...] = (_item, words.code, lambda rng: rng.randrange(1000))
        filled = {key: rng.choice(kinds)(rng) for key in keys}
        told = [f"The {key} is {filled[key]}." for key in rng.sample(keys, len(keys))]
    else:
        keys = rng.sample(tuple(_JSON_FIELDS), rng.randint(1, 4))
        filled = {key: drawn[key] for key in keys}
        told = [_JSON_FIELDS[key][1].format(drawn[key]) for key in rng.sample(keys, len(keys))]
    return filled, " ".join(told)


def json_object(rng: random.Random, split: Split) -> Exchange:
    """A template with empty values, and sentences that tell them. Held out: the filled object."""
    while True:
        filled, text = _filling(rng)
        if belongs(answer := json.dumps(filled), split):
            break
    empty = json.dumps({key: 0 if isinstance(value, int) else "" for key, value in filled.items()})
    return rng.choice(_JSON_REQUESTS).replace("{empty}", empty).replace("{text}", text), answer


_TALK = {
    ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Hey there", "Greetings"): "Hello! How can I help you?",
    ("Good morning", "Good morning to you"): "Good morning!",
    ("Good evening", "Good evening to you"): "Good evening!",
    ("Who are you", "What are you", "What is your name", "Tell me who you are", "Introduce yourself",
     "What model are you", "Which model is this", "Who made you"): "I am Baton's tiny demo model.",
    ("How are you", "How are you today", "How do you do", "How is it going", "Are you well"): "I am fine, thank you.",
    ("Thanks", "Thank you", "Many thanks", "Thank you very much", "Thanks a lot"): "You are welcome.",
    ("Bye", "Goodbye", "See you later", "See you tomorrow", "Good night", "Bye bye"): "Goodbye!",
    ("What can you do", "How can you help me", "What are you good at", "Which tasks can you do", "Help"):
        "I can add, count, spell, reverse and repeat, recall what you told me, find codes, fill JSON and call tools.",
}
_TALK_ANSWERS = {opening: answer for openings, answer in _TALK.items() for opening in openings}
_BEYOND = ("Why is the {adjective} {noun} so {adjective2}?", "Who {verb} the {noun}?", "Tell me about the {noun}.",
           "Tell me a joke.", "How old is {name}?", "Write a poem about a {noun}.", "Where is the {noun}?",
           "Explain the {noun} to me.", "Which {noun} is the best?", "Translate {noun} into French.",
           "When was the {noun} built?", "What is {a} times {b}?", "Is the {noun} {adjective}?", "What is a {noun}?",
           "{noun}", "{sentence}", "Write a story.", "Do you like the {noun}?",
           "How do I get to {city}?", "What is the best {noun} in {city}?", "How many people live in {city}?")


def beyond(rng: random.Random, split: Split) -> Exchange:
    """What the model never learned, and says so. Held out: the texts."""
    while True:
        text = loosen(rng, rng.choice(_BEYOND)).format(
            noun=rng.choice(words.NOUNS), adjective=rng.choice(words.ADJECTIVES), city=rng.choice(words.CITIES),
            adjective2=rng.choice(words.ADJECTIVES), verb=rng.choice(words.VERBS), name=rng.choice(words.NAMES),
            a=rng.randrange(100), b=rng.randrange(100), sentence=words.filler_sentence(rng))
        if belongs(text, split):
            return text, UNKNOWN


def smalltalk(rng: random.Random, split: Split) -> Exchange:
    """Held out: spellings of the phrases (capitals, closing marks, an address); one in four is ``beyond`` the model."""
    if rng.random() < 0.25:
        return beyond(rng, split)
    while True:
        opening = rng.choice(tuple(_TALK_ANSWERS))
        text = opening + rng.choice(("", "", "", ", Baton", " please", ", my friend", ", model"))
        text = rng.choice((text, text.lower(), text[0].lower() + text[1:])) + rng.choice(("", ".", "!", "?"))
        if belongs(text, split):
            return text, _TALK_ANSWERS[opening]


MAKERS: tuple[Maker, ...] = (capital, two_digit_sum, reverse, spell, repeat, json_object, smalltalk)
"""What may stand between other exchanges; ``count`` is left out only for its length."""
