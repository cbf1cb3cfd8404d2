"""A request inside the engine."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..api.errors import ServingError
from ..api.messages import Bootstrap, Finish, Generate, LatencySpan, Logprobs, Output, Pooling, StageName
from ..api.sampling import SamplingParams
from ..kvcache.manager import PageTable
from .hidden_states import HiddenStates
from .logit_bias import LogitBias
from .logit_processors import RequestTokens, RowProcessor
from .sampling_metadata import FillAllowed, RequestedLogprobs, SamplingMetadata
from .token_buffer import TokenBuffer
from .token_history import TokenHistory

if TYPE_CHECKING:
    from ..grammar.matcher import Matcher
    from .swapped_out import SwappedOut


@dataclass(eq=False)
class Req:
    """Engine state of one request.

    ``num_computed_tokens`` of the tokens have their keys and values in the pages of ``hold``, or will have once the
    step in flight has run; a step computes some of the rest, and where it reaches the end it samples a new token.
    ``num_pending`` of these exist on the device, but their values have not reached the host yet.
    """

    rid: str
    tokens: TokenBuffer
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    arrived: float
    deadline: float
    bootstrap: Bootstrap | None = None
    logprobs: RequestedLogprobs | None = None
    history: TokenHistory | None = None  # None: no penalties
    bias: LogitBias | None = None
    processor: RowProcessor | None = None
    embeds: np.ndarray | None = None  # [n, hidden] float32, in place of the first n tokens' embeddings
    hidden: HiddenStates | None = None  # where the request wants them
    matcher: Matcher | None = None  # on the rank that chooses tokens, where there is a grammar
    logprob_start: int | None = None  # first prompt position whose logprob is wanted
    priority: int | None = None  # None: the server's default
    # filled by the scheduler
    hold: PageTable | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_retractions: int = 0
    saved: SwappedOut | None = None  # pages in host memory, while it waits after a retraction
    finish: Finish | None = None
    prompt_logprobs: Logprobs | None = None
    pooling: Pooling | None = None
    reported: bool = False
    embedding: bytes | None = None
    stages: list[LatencySpan] | None = None  # that have ended and were not told yet; None where nobody asks

    @classmethod
    def from_message(cls, message: Generate, *, eos_ids: frozenset[int], now: float, timeout: float) -> Req:
        """Raises InvalidRequest where the processor cannot be imported."""
        sampling = message.sampling
        wants_prompt = message.return_logprob and message.logprob_start_len >= 0
        tokens = TokenBuffer(message.input_ids)
        begin = len(tokens) - message.num_answered
        embeds = None
        if message.input_embeds is not None:
            embeds = np.frombuffer(message.input_embeds, "<f4").reshape(begin, -1)
        num_embeds = 0 if embeds is None else begin
        # An answer by a grammar ends with an EOS token where nothing else may follow, whatever the request ignores.
        ends = sampling.grammar is not None or not sampling.ignore_eos
        return cls(
            rid=message.rid,
            tokens=tokens,
            num_prompt_tokens=len(message.input_ids),
            sampling=sampling,
            stop_ids=frozenset(sampling.stop_token_ids) | (eos_ids if ends else frozenset()),
            arrived=now,
            deadline=now + (timeout if message.deadline is None else min(timeout, message.deadline)),
            bootstrap=message.bootstrap,
            logprobs=RequestedLogprobs(message.top_logprobs_num, tuple(message.token_ids_logprob))
            if message.return_logprob else None,
            history=TokenHistory(tokens, begin, first=num_embeds) if sampling.penalizes else None,
            bias=LogitBias.of(sampling.logit_bias) if sampling.logit_bias else None,
            logprob_start=message.logprob_start_len if wants_prompt else None,
            stages=[] if message.traced else None,
            pooling=message.pooling,
            priority=message.priority,
            processor=None if message.processor is None else RowProcessor.of(
                message.processor.path, message.processor.params, RequestTokens(tokens, num_embeds, begin)),
            embeds=embeds,
            hidden=HiddenStates() if message.return_hidden_states else None,
        )

    def __repr__(self) -> str:
        return (f"Req({self.rid}, prompt {self.num_prompt_tokens}, output {self.num_output_tokens}, "
                f"computed {self.num_computed_tokens})")

    @property
    def num_output_tokens(self) -> int:
        return self.tokens.count - self.num_prompt_tokens

    @property
    def length(self) -> int:
        """Tokens of the request, pending ones included."""
        return self.tokens.count + self.num_pending

    @property
    def complete(self) -> bool:
        """Whether the pending token is the last that was asked for, whatever it is."""
        return self.tokens.count + self.num_pending - self.num_prompt_tokens >= self.sampling.max_new_tokens

    @property
    def prompt(self) -> np.ndarray:
        return self.tokens.view(0, self.num_prompt_tokens)

    @property
    def prompt_digest(self) -> int:
        """A checksum by which the halves of a pair see that they mean the same prompt."""
        return zlib.crc32(self.prompt.tobytes(), 0 if self.embeds is None else zlib.crc32(self.embeds.tobytes()))

    @property
    def computed(self) -> np.ndarray:
        return self.tokens.view(0, self.num_computed_tokens)

    @property
    def max_tokens(self) -> int:
        """Length that prompt and output may reach together."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens

    @property
    def prefix_limit(self) -> int:
        """Tokens that may be taken from the prefix cache when this engine samples the next token itself.

        The last token must be computed for its logits, as must every position whose prompt logprob is wanted.
        """
        if self.pooling == "mean":
            return 0  # the average is over computed hidden states, and the cache holds none
        limit = len(self.tokens) - 1
        if self.hidden is not None:
            limit = min(limit, self.hidden.num_launched)
        if self.embeds is not None:
            return 0  # the cache knows pages by their tokens
        if self.logprob_start is not None:
            told = 0 if self.prompt_logprobs is None else len(self.prompt_logprobs.values)
            if self.logprob_start + told < self.num_prompt_tokens:
                limit = min(limit, max(0, self.logprob_start + told - 1))
        return limit

    def choosing(self, position: int, pending: int | None, allowed: FillAllowed | None = None) -> SamplingMetadata:
        """How the token at ``position`` is to be chosen: the one after all that the request has, pending ones too.

        ``pending`` is the index of the pending token, if there is one, among those that the step before chose.
        ``allowed`` is the mask of its grammar, which also sees to ``min_new_tokens``.
        """
        early = self.sampling.grammar is None and position - self.num_prompt_tokens < self.sampling.min_new_tokens
        return SamplingMetadata(self.sampling, position, self.logprobs, tuple(self.stop_ids) if early else (), allowed,
                                self.history, pending, self.bias, self.processor)

    def take_pending(self, token_id: int) -> list[int]:
        """``take`` the pending token."""
        self.num_pending -= 1
        return self.take(token_id)

    def take(self, token_id: int) -> list[int]:
        """Append a token; sets ``finish`` where it is the last. Returns the tokens to report: none where
        only the prompt was wanted."""
        most = self.sampling.max_new_tokens
        if most == 0:
            self.finish = Finish("length")
            return []
        self.tokens.append(token_id)
        if token_id in self.stop_ids:
            self.finish = Finish("stop", token_id)
        elif self.tokens.count - self.num_prompt_tokens >= most:
            self.finish = Finish("length")
        return [token_id]

    def mark(self, name: StageName) -> None:
        """The stage ends now."""
        if self.stages is not None:
            self.stages.append(LatencySpan(name, time.monotonic()))

    @property
    def failure(self) -> ServingError | None:
        """Why the output is not what was asked for, though it has ended; None where it is, and on ranks beside the one
        that chooses tokens, which tell nobody."""
        if self.matcher is None or self.finish is None or self.finish.reason != "stop":
            return None
        return self.matcher.error_at_end()

    def output(self, token_ids: list[int], logprobs: Logprobs | None) -> Output:
        """The message that tells the front of tokens gained; prompt logprobs travel with the first."""
        if self.reported and not self.stages and self.hidden is None and self.embedding is None:  # nearly all
            return Output(self.rid, token_ids, self.num_prompt_tokens, self.num_cached_tokens,
                          self.tokens.count - self.num_prompt_tokens, self.finish, logprobs if token_ids else None)
        first, self.reported = not self.reported, True
        stages: list[LatencySpan] = []
        if self.stages:
            stages, self.stages = self.stages, []
        return Output(
            rid=self.rid, token_ids=token_ids, num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens, num_output_tokens=self.num_output_tokens, finish=self.finish,
            logprobs=logprobs if token_ids else None, prompt_logprobs=self.prompt_logprobs if first else None,
            stages=stages, embedding=self.embedding, hidden_states=None if self.hidden is None else self.hidden.take(),
        )
