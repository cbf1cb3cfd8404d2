"""The words of programs: what they append to a state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .choices import ChoicesMethod, token_length_normalized
from .errors import ProgramError
from .expressions import Expression, Gen, Media, RoleBegin, RoleEnd, Select, expression
from .sampling import SamplingParams


def gen(name: str | None = None, max_tokens: int | None = None, min_tokens: int | None = None, n: int | None = None,
        stop: str | list[str] | None = None, stop_token_ids: list[int] | None = None,
        stop_regex: str | list[str] | None = None, temperature: float | None = None, top_p: float | None = None,
        top_k: int | None = None, min_p: float | None = None, frequency_penalty: float | None = None,
        presence_penalty: float | None = None, ignore_eos: bool | None = None, return_logprob: bool | None = None,
        logprob_start_len: int | None = None, top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None, dtype: type | str | None = None,
        choices: Sequence[str] | None = None, choices_method: ChoicesMethod | None = None, regex: str | None = None,
        json_schema: str | dict[str, Any] | None = None) -> Expression:
    """Generates a text and keeps it as variable ``name``; what is None is the run's.

    ``dtype`` (int, float, bool, str), ``regex`` or ``json_schema`` constrain the text. With ``choices`` it is
    ``select``. ``n`` texts become a list, of which the state goes on with the first. Raises ProgramError for an invalid
    regex.
    """
    if choices:
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise ProgramError(f"regex {regex!r} is not valid: {error}.") from None
    return Expression((Gen(name, SamplingParams(
        max_new_tokens=max_tokens, min_new_tokens=min_tokens, n=n, stop=stop, stop_token_ids=stop_token_ids,
        stop_regex=stop_regex, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, ignore_eos=ignore_eos,
        return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs, dtype=dtype, regex=regex, json_schema=json_schema)),))


def gen_int(name: str | None = None, max_tokens: int | None = None, **params: Any) -> Expression:
    """``gen`` of an integer."""
    return gen(name, max_tokens, dtype=int, **params)


def gen_string(name: str | None = None, max_tokens: int | None = None, **params: Any) -> Expression:
    """``gen`` of a text in double quotes."""
    return gen(name, max_tokens, dtype=str, **params)


def select(name: str | None = None, choices: Sequence[str] | None = None, temperature: float = 0.0,
           choices_method: ChoicesMethod = token_length_normalized) -> Expression:
    """Appends one of ``choices`` and keeps it as variable ``name``.

    Raises ProgramError where there is none, and for a ``temperature`` above 0: the most likely one is taken.
    """
    if not choices:
        raise ProgramError("select needs choices: give a list of texts.")
    if temperature > 1e-5:
        raise ProgramError("select takes the most likely choice: leave temperature out, or give 0.")
    return Expression((Select(name, tuple(choices), choices_method),))


def image(source: Any) -> Expression:
    """An image in the prompt. The interpreter refuses it: no backend takes images."""
    return Expression((Media("image", source),))


def video(path: str, num_frames: int) -> Expression:
    """A video in the prompt. The interpreter refuses it: no backend takes videos."""
    return Expression((Media("video", (path, num_frames)),))


def role(name: str, content: object = None) -> Expression:
    """A whole turn of a role."""
    inside = () if content is None else expression(content).parts
    return Expression((RoleBegin(name), *inside, RoleEnd(name)))


def system(content: object = None) -> Expression:
    """The system's turn."""
    return role("system", content)


def user(content: object = None) -> Expression:
    """The user's turn."""
    return role("user", content)


def assistant(content: object = None) -> Expression:
    """The model's turn: ``assistant(gen("answer"))``."""
    return role("assistant", content)


def system_begin() -> Expression:
    """Opens the system's turn."""
    return Expression((RoleBegin("system"),))


def system_end() -> Expression:
    """Closes the system's turn."""
    return Expression((RoleEnd("system"),))


def user_begin() -> Expression:
    """Opens the user's turn."""
    return Expression((RoleBegin("user"),))


def user_end() -> Expression:
    """Closes the user's turn."""
    return Expression((RoleEnd("user"),))


def assistant_begin() -> Expression:
    """Opens the model's turn."""
    return Expression((RoleBegin("assistant"),))


def assistant_end() -> Expression:
    """Closes the model's turn."""
    return Expression((RoleEnd("assistant"),))
