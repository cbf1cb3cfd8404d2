"""Requests of all kinds in random order: greedy and seeded, with extras, grammars, stop tokens, of all lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.common.api.grammar import GrammarSpec
from baton.common.api.sampling import SamplingParams
from baton.tests.helpers.acceptance_parity import SCHEMAS, Prompts
from baton.tests.helpers.flag_engine import Answer, Question
from baton.tests.helpers.grammar_engine import schema_spec
from baton.tests.tinychat import tasks

LONGEST_PROMPT = 400
MOST_NEW_TOKENS = 40

_GRAMMARS = (*map(schema_spec, SCHEMAS), GrammarSpec("regex", r"(yes|no|maybe), [a-z]{2,12}\."),
             GrammarSpec("regex", r"\d{1,3}( \d{1,3}){2,6}"))
_Fields = dict[str, Any]


def _seeded(rng: random.Random) -> _Fields:
    return {"temperature": rng.choice((0.3, 0.7, 1.0, 1.5)), "seed": rng.getrandbits(40)}


_KINDS: dict[str, tuple[int, Callable[[random.Random], _Fields]]] = {
    "greedy": (4, lambda rng: {}),
    "seeded": (3, _seeded),
    "top-p, top-k, min-p": (2, lambda rng: {**_seeded(rng), "top_p": rng.choice((0.5, 0.9, 1.0)),
                                            "top_k": rng.choice((-1, 5, 40)), "min_p": rng.choice((0.0, 0.05))}),
    "penalties": (2, lambda rng: {**rng.choice(({}, _seeded(rng))), "frequency_penalty": rng.choice((0.0, 0.5, -0.3)),
                                  "presence_penalty": rng.choice((0.0, 0.4)),
                                  "repetition_penalty": rng.choice((1.0, 1.1))}),
    "bias": (1, lambda rng: {**rng.choice(({}, _seeded(rng))),
                             "logit_bias": {rng.randrange(3, 4000): rng.choice((-5.0, 3.0)) for _ in range(4)}}),
    "fewest tokens": (1, lambda rng: {"min_new_tokens": rng.randint(1, 12), **rng.choice(({}, _seeded(rng)))}),
    "stop tokens": (1, lambda rng: {"stop_token_ids": tuple(rng.sample(range(3, 400), 40))}),
    "no end": (1, lambda rng: {"ignore_eos": True, **rng.choice(({}, _seeded(rng)))}),
    "grammar": (2, lambda rng: {"grammar": rng.choice(_GRAMMARS), **rng.choice(({}, _seeded(rng)))}),
    "grammar, penalties": (1, lambda rng: {"grammar": rng.choice(_GRAMMARS), "frequency_penalty": 0.4,
                                           **_seeded(rng)}),
}


@dataclass(frozen=True)
class Mixed:
    """A question of a ``kind``."""

    kind: str
    question: Question


def mixed_questions(seed: int) -> Iterator[Mixed]:
    """Questions without end; some continue the prompt of one before, some ask it again with another seed, as a request
    of several answers does, and a third wants logprobs."""
    rng, prompts = random.Random(seed), Prompts()
    recent: list[list[int]] = []
    weights = [weight for weight, _ in _KINDS.values()]
    for example in tasks.stream(seed + 1000):
        prompt = prompts.ids(example)
        if len(prompt) > LONGEST_PROMPT:
            continue
        if recent and rng.random() < 0.3:
            prompt = rng.choice(recent) + (prompt if rng.random() < 0.5 else [])
        recent = [*recent[-15:], prompt[:LONGEST_PROMPT]]
        kind = rng.choices(list(_KINDS), weights)[0]
        fields = {"temperature": 0.0, **_KINDS[kind][1](rng)}
        most = max(rng.choice((1, 2, 3, 8, MOST_NEW_TOKENS, MOST_NEW_TOKENS)), fields.get("min_new_tokens", 0))
        params = SamplingParams(**{"max_new_tokens": most, **fields})
        logprobs = {"return_logprob": True, "top_logprobs_num": rng.choice((0, 3))} if rng.random() < 0.33 else {}
        yield Mixed(kind, Question(prompt[:LONGEST_PROMPT], params, fields=logprobs))


def chunks(seed: int, count: int, size: int) -> Iterator[list[Mixed]]:
    """The first ``count`` mixed questions, ``size`` at a time."""
    stream = mixed_questions(seed)
    for begin in range(0, count, size):
        yield list(islice(stream, min(size, count - begin)))


def differences(one: Sequence[Answer], other: Sequence[Answer], bitwise: bool) -> list[int]:
    """The places of answers that are not equal: in tokens, ends, and logprobs, which without ``bitwise`` may differ in
    their last digits."""
    def same(a: Answer, b: Answer) -> bool:
        if (a.tokens, a.finish, len(a.logprobs)) != (b.tokens, b.finish, len(b.logprobs)):
            return False
        return a.logprobs == b.logprobs if bitwise else all(
            abs(x - y) < 1e-3 for x, y in zip(a.logprobs, b.logprobs))

    return [place for place, (a, b) in enumerate(zip(one, other)) if not same(a, b)]
