"""Generation and choices by bodies of ``/generate``, which a server and an engine in this process both take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..choices import ChoicesMethod, Decision, ScoredChoices, TokenLogprob
from ..errors import ProgramError
from ..sampling import SamplingParams
from .base import Answer, Prompt

_BODY_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")


class Generates(Protocol):
    """Answers bodies of ``/generate``."""

    def answer(self, body: dict[str, Any]) -> Any:
        """One answer, or a list of them to several prompts and to ``n``."""

    def answers(self, body: dict[str, Any]) -> Iterator[Any]:
        """Answers so far of a stream."""


def generate(client: Generates, prompt: Prompt, params: SamplingParams) -> Answer:
    answer = client.answer(_body(prompt, params))
    if isinstance(answer, list):
        return Answer([each["text"] for each in answer], [each["meta_info"] for each in answer])
    return Answer(answer["text"], answer["meta_info"])


def stream(client: Generates, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
    """Pieces of the answer; a server sends each time the whole text so far."""
    position = 0
    for answer in client.answers(_body(prompt, params)):
        yield Answer(answer["text"][position:], answer["meta_info"])
        position = len(answer["text"])


def _body(prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
    if not prompt.text:
        raise ProgramError("gen needs a prompt: append a text first.")
    given = params.typed().given()
    if schema := params.schema():
        given["json_schema"] = schema
    body: dict[str, Any] = {name: given.pop(name) for name in _BODY_FIELDS if name in given}
    return {**body, "text": prompt.text, "sampling_params": given}


def cache_prefix(client: Generates, text: str) -> int:
    """Computes a text; returns the number of its tokens."""
    answer = client.answer({"text": text, "sampling_params": {"max_new_tokens": 0}})
    return int(answer["meta_info"]["prompt_tokens"])


def select(client: Generates, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision:
    """Scores each choice as the end of a prompt.

    The prompt's last token is scored too: where a tokenizer joins it with a choice's first letters, the joined token is
    the choice's. Where it stays as it was, it is left out.
    """
    length = cache_prefix(client, prompt.text) if prompt.text else 0
    scored = _score(client, {"text": [prompt.text + choice for choice in choices],
                             "logprob_start_len": max(length - 2, 0)})
    tokens = [_of_choice(each, prompt.text, choice) for each, choice in zip(scored, choices)]
    alone = None
    if method.needs_unconditional:
        alone = _score(client, {"input_ids": [[token[1] for token in each] for each in tokens], "logprob_start_len": 0})
    return method(ScoredChoices(choices, tokens, alone))


def _score(client: Generates, fields: dict[str, Any]) -> list[list[TokenLogprob]]:
    answers = client.answer({**fields, "return_logprob": True, "return_text_in_logprobs": True,
                             "sampling_params": {"max_new_tokens": 0, "temperature": 0}})
    return [answer["meta_info"]["input_token_logprobs"] for answer in answers]


def _of_choice(tokens: list[TokenLogprob], prompt: str, choice: str) -> list[TokenLogprob]:
    """``tokens`` without those that end within the prompt: the first two may."""
    lengths = [len(token[2] or "") for token in tokens]
    over = sum(lengths) - len(choice)  # characters of the prompt that these tokens cover
    dropped = sum(sum(lengths[:end]) <= min(over, len(prompt)) for end in (1, 2) if end < len(tokens))
    return tokens[dropped:]
