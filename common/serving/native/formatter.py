"""Answers of ``/generate``, each a choice's complete answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...api.messages import Logprobs
from ...config.model import ModelSpec
from ..context.draft_counts import Speculation
from ..context.generation import Choice
from ..protocol.logprobs import TokenBytes, joined, native_lists, native_logprobs
from ..protocol.row_extras import experts_base64, state_lists
from .schema import GenerateAnswer


class GenerateFormatter:
    """Formats each choice's complete answer so far, as SGLang's clients expect; see ``respond.ResponseFormatter``."""

    def __init__(self, token_bytes: TokenBytes | None, batched: bool, spec: ModelSpec, *,
                 stream_output: bool = False, with_prompt: bool = False, experts_start: int = 0):
        """``stream_output``: each event of a stream has the output since the one before, not that so far.
        ``with_prompt``: the end of each answer has its prompt's token ids. ``experts_start``: the first position whose
        experts are asked for."""
        self._experts_start = experts_start
        self._with_prompt = with_prompt
        self._stream_output = stream_output
        self._spec = spec
        self._token_bytes = token_bytes
        self._batched = batched

    def full(self, choices: Sequence[Choice]) -> GenerateAnswer | list[GenerateAnswer]:
        answers = [self._answer(choice) for choice in choices]
        return answers if self._batched else answers[0]

    def start(self, choices: Sequence[Choice]) -> None:
        """Nothing to do: output that another server sent is part of every chunk."""

    def delta(self, choice: Choice) -> list[GenerateAnswer]:
        delta = choice.take_delta()
        index = choice.index if self._batched else None
        if not self._stream_output:
            return [self._answer(choice, index)]
        info = self._info(choice, choice.visible(joined(delta.logprobs)))
        return [GenerateAnswer(delta.text, delta.token_ids, info, index, self._prompt(choice))]

    def finish(self, choices: Sequence[Choice]) -> list[GenerateAnswer]:
        return []

    def _answer(self, choice: Choice, index: int | None = None) -> GenerateAnswer:
        return GenerateAnswer(choice.text, choice.token_ids, self._info(choice, choice.logprobs), index,
                              self._prompt(choice))

    def _prompt(self, choice: Choice) -> list[int] | None:
        return choice.prompt_ids if self._with_prompt and choice.finish is not None else None

    def _info(self, choice: Choice, logprobs: Logprobs | None) -> dict[str, Any]:
        """``meta_info``, with the output's ``logprobs``."""
        info = _meta_info(choice, logprobs, self._token_bytes)
        info["weight_version"] = choice.weight_version
        if len(choice.weight_versions) > 1:
            info["weight_versions"] = choice.weight_versions
        if choice.request.return_hidden_states and choice.finish is not None:  # a stream sends them once, with its end
            info["hidden_states"] = state_lists(b"".join(choice.hidden_states), choice.num_prompt_tokens,
                                                self._spec.hidden_size)
        if choice.request.return_routed_experts and choice.finish is not None:
            info["routed_experts"] = experts_base64(
                choice.routed_experts, self._spec, self._experts_start,
                choice.num_prompt_tokens + choice.num_output_tokens - 1)
        return info


def _meta_info(choice: Choice, output: Logprobs | None, token_bytes: TokenBytes | None) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": choice.rid, "finish_reason": _finish_reason(choice), "prompt_tokens": choice.num_prompt_tokens,
        "completion_tokens": choice.num_output_tokens, "cached_tokens": choice.num_cached_tokens,
        "cached_tokens_details": msgspec.to_builtins(choice.cached_tokens_details),
    }
    if choice.finish is not None:
        info["e2e_latency"] = choice.latency
    if choice.speculation is not None:
        info |= _speculation(choice.speculation)
    for side, logprobs in (("input", choice.prompt_logprobs), ("output", output)):
        if choice.request.return_logprob:
            logprobs = logprobs or Logprobs([], [])
            info[f"{side}_token_logprobs"] = native_logprobs(logprobs, token_bytes)
            if choice.request.top_logprobs_num:
                info[f"{side}_top_logprobs"] = native_lists(logprobs.top, token_bytes)
            if choice.request.token_ids_logprob:
                info[f"{side}_token_ids_logprobs"] = native_lists(logprobs.of_ids, token_bytes)
    return info


def _speculation(counts: Speculation) -> dict[str, Any]:
    """SGLang's fields; ``spec_acceptance_simulated`` is ours."""
    info = {
        "spec_verify_ct": counts.num_steps, "spec_draft_token_num": counts.num_drafts,
        "spec_accept_token_num": counts.num_accepted,
        "spec_accept_length": counts.accept_length,
        "spec_accept_rate": counts.num_accepted / counts.num_drafts if counts.num_drafts else 0.0,
        "spec_accept_histogram": counts.histogram}
    return info | {"spec_acceptance_simulated": True} if counts.simulated else info


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.finish is None:
        return None
    reason: dict[str, Any] = {"type": choice.finish.reason}
    if choice.finish.matched is not None:
        reason["matched"] = choice.finish.matched
    if choice.finish.reason == "abort":
        reason["message"] = "The request was aborted."
    if choice.finish.reason == "length":
        reason["length"] = choice.num_output_tokens
    return reason
