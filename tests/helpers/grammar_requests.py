"""Requests that are constrained by grammars, drawn at random, and a check of their answers."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema

from .json_schemas import BY_HAND, generated

PATTERNS = ["[0-9]{3}-[0-9]{4}", "(red|green|blue)(, (red|green|blue)){0,5}", "yes|no", "[a-z]{2,12}",
            r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,6}\.", "(ab|cd|ef){2,9}", "[ab]*"]
QUESTIONS = ["What is the capital of France?", "Who are you?", "Tell me about cats.", "What is 3 plus 4?",
             "Write a list of colours."]


@cache
def _validator(source: str) -> Any:
    schema = json.loads(source)
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)


@cache
def schemas() -> list[dict[str, Any]]:
    return [*BY_HAND.values(), *generated(30).values()]


@dataclass(frozen=True)
class GrammarRequest:
    """``grammar`` is a kind and its source; ``sampling`` further sampling parameters."""

    question: str
    grammar: tuple[str, str]
    sampling: dict[str, Any]

    @classmethod
    def draw(cls, number: int) -> GrammarRequest:
        rng = random.Random(number)
        kind = rng.choice(["json_schema", "json_schema", "regex"])
        source = json.dumps(rng.choice(schemas())) if kind == "json_schema" else rng.choice(PATTERNS)
        sampling: dict[str, Any] = {"max_new_tokens": rng.choice([12, 80, 80]), "temperature": rng.choice([0, 0.7, 1])}
        if rng.random() < 0.3:
            sampling |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        if rng.random() < 0.2:
            sampling["min_new_tokens"] = 5
        if rng.random() < 0.2:
            sampling["top_p"] = 0.9
        return cls(rng.choice(QUESTIONS), (kind, source), sampling)

    def is_valid(self, text: str) -> bool:
        """True where a whole answer obeys the grammar."""
        kind, source = self.grammar
        if kind == "regex":
            return re.fullmatch(source, text) is not None
        try:
            return bool(_validator(source).is_valid(json.loads(text)))
        except ValueError:
            return False
