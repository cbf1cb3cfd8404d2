"""Reads the outputs in messages that an engine has sent."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.common.api.messages import Finish, FromEngine, Logprobs, OutputBatch, OutputExtras
from baton.common.serving.context.draft_counts import DraftCounts, Speculation


@dataclass(frozen=True)
class SentOutput:
    """A request's new tokens of one step, with totals so far."""

    rid: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    extras: OutputExtras
    drafts: DraftCounts

    @property
    def speculation(self) -> Speculation:
        """The counts of the request's drafts so far."""
        return self.drafts.report(self.num_output_tokens)

    @property
    def finish(self) -> Finish | None:
        return self.extras.finish

    @property
    def logprobs(self) -> Logprobs | None:
        return self.extras.logprobs

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        return self.extras.prompt_logprobs

    @property
    def embedding(self) -> bytes | None:
        return self.extras.embedding

    @property
    def hidden_states(self) -> bytes | None:
        return self.extras.hidden_states


def outputs_of(messages: Iterable[FromEngine]) -> list[SentOutput]:
    """The outputs in ``messages``, in order; each request's first one must be there."""
    last: dict[str, SentOutput] = {}
    outputs: list[SentOutput] = []
    for message in messages:
        for rid, token_ids, extras, num_drafts in message.rows() if isinstance(message, OutputBatch) else ():
            extras = extras or OutputExtras()
            if (usage := extras.usage) is not None:
                prompt, cached, done, drafts = usage.num_tokens, usage.num_cached_tokens, 0, DraftCounts()
            else:
                before = last[rid]
                prompt, cached, done, drafts = (before.num_prompt_tokens, before.num_cached_tokens,
                                                before.num_output_tokens, before.drafts)
            if num_drafts:
                drafts.add(num_drafts, len(token_ids))
            last[rid] = SentOutput(rid, token_ids, prompt, cached, done + len(token_ids), extras, drafts)
            outputs.append(last[rid])
    return outputs
