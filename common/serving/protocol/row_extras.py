"""Options of requests for each row beyond sampling parameters: logit processors, hidden states, experts."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...api.errors import InvalidRequest
from ...api.messages import CustomProcessor, Generate
from ...config.model import ModelSpec
from ...config.server import AnswerArgs
from ...request.position_rows import ROUTED_EXPERTS

MAX_HIDDEN_BYTES = 32 << 20  # of one answer; with it a prefill server's result stays below its 64 MiB
MAX_SERIALIZED_PROCESSOR = 256 << 10  # characters; a rank keeps 128 of them
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_PARAM = "custom_logit_processor"


class _Serialized(msgspec.Struct):
    callable: str


_decode_serialized = msgspec.json.Decoder(_Serialized).decode


def custom_processor(given: str | None, params: dict[str, Any] | None) -> CustomProcessor | None:
    """None where there is none; raises InvalidRequest for what is neither an import path nor SGLang's serialized form.
    Nothing is imported or unpickled here: ranks do that."""
    if not given:
        return None
    if given.lstrip().startswith("{"):
        _check_serialized(given)
    elif len(given) > 512 or not _IMPORT_PATH.fullmatch(given):
        raise InvalidRequest(f"{_PARAM} must be an import path like 'package.module:Name', or what SGLang's to_str() "
                             f"returns, got {given[:80]!r}.", param=_PARAM)
    try:
        msgspec.msgpack.encode(params)
    except (OverflowError, RecursionError):
        raise InvalidRequest("custom_params must hold integers of 64 bits at most, and not be nested too deeply.",
                             param="sampling_params.custom_params") from None
    return CustomProcessor(given, params or {})


def _check_serialized(given: str) -> None:
    if len(given) > MAX_SERIALIZED_PROCESSOR:
        raise InvalidRequest(f"{_PARAM} has {len(given)} characters, and a serialized one may have "
                             f"{MAX_SERIALIZED_PROCESSOR}; install the class on the server and name it.", param=_PARAM)
    try:
        bytes.fromhex(_decode_serialized(given).callable)
    except (ValueError, msgspec.MsgspecError):
        raise InvalidRequest(f'{_PARAM} begins like a serialized one, which is {{"callable": "..."}} with a pickle in '
                             "hexadecimal digits, as SGLang's to_str() returns it.", param=_PARAM) from None


def set_row_extras(requests: Sequence[Generate], processors: Sequence[CustomProcessor | None], hidden: Sequence[bool],
                   allowed: AnswerArgs, hidden_size: int) -> None:
    """Sets processor and hidden states of ``requests``, equally many for each prompt; ``processors`` and ``hidden``
    have an entry for each prompt. Raises InvalidRequest."""
    for asked, allows, name in ((any(processors), allowed.enable_custom_logit_processor, _PARAM),
                                (any(hidden), allowed.enable_return_hidden_states, "return_hidden_states")):
        if asked and not allows:
            raise InvalidRequest(f"{name} needs a server that was started with --enable-{name.replace('_', '-')}; "
                                 "leave it out.", param=name, code="unsupported_parameter")
    for i, request in enumerate(requests):
        prompt = i * len(processors) // len(requests)
        request.processor, request.return_hidden_states = processors[prompt], hidden[prompt]
        if request.return_hidden_states:
            _check_bytes("return_hidden_states", len(request.input_ids) + request.sampling.max_new_tokens,
                         4 * hidden_size)


def set_routed_experts(requests: Sequence[Generate], asked: Sequence[bool], start: int | None, allowed: AnswerArgs,
                       spec: ModelSpec) -> None:
    """Sets which of ``requests``, equally many for each prompt, ask for the experts of their tokens, from the position
    ``start`` on. Raises InvalidRequest."""
    name = "return_routed_experts"
    if start is not None and start < 0:
        raise InvalidRequest(f"routed_experts_start_len must be 0 or more, not {start}.",
                             param="routed_experts_start_len")
    if not any(asked):
        return
    if not allowed.enable_return_routed_experts:
        raise InvalidRequest(f"{name} needs a server that was started with --enable-return-routed-experts; leave it "
                             "out.", param=name, code="unsupported_parameter")
    assert spec.moe is not None
    for i, request in enumerate(requests):
        request.return_routed_experts = asked[i * len(asked) // len(requests)]
        if request.return_routed_experts:
            _check_bytes(name, len(request.input_ids) + request.sampling.max_new_tokens,
                         2 * spec.num_layers * spec.moe.top_k)


def _check_bytes(name: str, num_tokens: int, bytes_per_token: int) -> None:
    """Raises InvalidRequest where the rows of prompt and output together are too many."""
    most = MAX_HIDDEN_BYTES // bytes_per_token
    if num_tokens > most:
        raise InvalidRequest(f"{name} goes with {most} tokens of prompt and output at most on this model (32 MiB), the "
                             f"request has {num_tokens}; shorten the prompt or lower max_new_tokens.", param=name)


def experts_base64(rows: Sequence[bytes], spec: ModelSpec, start: int, stop: int) -> str:
    """SGLang's form: base64 of int32 ``[positions, layers, top_k]``, of the positions ``start:stop``."""
    assert spec.moe is not None
    experts = np.frombuffer(b"".join(rows), ROUTED_EXPERTS).reshape(-1, spec.num_layers * spec.moe.top_k)[start:stop]
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def state_lists(states: bytes, num_prompt_tokens: int, hidden_size: int) -> list[Any]:
    """SGLang's form: the prompt's states ``[n, hidden]`` first, then one ``[hidden]`` for each decode step."""
    rows = np.frombuffer(states, "<f4").reshape(-1, hidden_size).tolist()
    return [rows[:num_prompt_tokens], *rows[num_prompt_tokens:]]


def last_state(states: Sequence[bytes], hidden_size: int) -> list[float]:
    """``[hidden]``: the newest state of the parts, after which the last token was sampled; empty without output."""
    newest: list[float] = np.frombuffer(states[-1], "<f4")[-hidden_size:].tolist() if states else []
    return newest
