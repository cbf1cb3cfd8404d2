"""Engine state of a request."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

import numpy as np

from ..api.drafts import Drafts
from ..api.errors import ServingError
from ..api.messages import (
    Bootstrap,
    Finish,
    Generate,
    LatencySpan,
    LoadedTokens,
    Logprobs,
    OutputExtras,
    Pooling,
    PromptUsage,
    SpanName,
)
from ..api.namespace import SHARED, Namespace
from ..api.sampling import SamplingParams
from ..kvcache.manager import PageTable
from ..kvcache.page_keys import PageKey
from .extras import Extra, extras_of
from .logit_bias import LogitBias
from .logit_processors import RequestTokens, RowProcessor
from .output_matcher import OutputMatcher
from .position_rows import HIDDEN_STATE, ROUTED_EXPERTS, PositionRows
from .sampling_metadata import RequestedLogprobs
from .token_buffer import TokenBuffer
from .token_history import TokenHistory


@dataclass(frozen=True)
class SwappedOut:
    """A retracted request's first ``num_tokens`` tokens in host tiers: by cache group the first page that is there, and
    the keys from that one on. ``draft_gap`` as in PageTable."""

    pages: list[tuple[int, list[PageKey]]]
    num_tokens: int
    draft_gap: int | None = None


@dataclass(eq=False, slots=True)  # without slots, more than 30 fields would take twice as long to read
class Req:
    """Engine state of one request.

    ``num_computed_tokens`` of the tokens have their keys and values in the pages of ``page_table``, or will have them
    once the step in flight has run; a step computes some of the rest, and where it reaches the last token it samples a
    new one. ``num_pending`` sampled tokens exist on the device only: their values have not reached the host yet.
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
    hidden: PositionRows | None = None  # where the request asks for hidden states
    routed: PositionRows | None = None  # and for the experts of its tokens
    matcher: OutputMatcher | None = None  # on the rank that samples tokens, where there is a grammar
    logprob_start: int | None = None  # first prompt position whose logprob is reported
    priority: int | None = None  # None: the server's default
    slo_ttft: float | None = None  # seconds from its arrival to its first token; None: the server's default
    namespace: Namespace = SHARED  # of its pages in the prefix cache
    # filled by the scheduler
    page_table: PageTable | None = None
    num_cached_tokens: int = 0
    loaded: LoadedTokens | None = None  # of the cached tokens
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_retractions: int = 0
    drafts: Drafts | None = None  # what its next step verifies
    swapped_out: SwappedOut | None = None  # while it waits after a retraction
    finish: Finish | None = None
    keeps_pages: bool = True  # when it ends, in the prefix cache: False where its keys and values may not be finite
    prompt_logprobs: Logprobs | None = None
    pooling: Pooling | None = None
    sends_kv: bool = False  # its pages are pushed to another server as they are computed
    reported: bool = False
    embedding: bytes | None = None
    extras: tuple[Extra, ...] = field(init=False)  # what its rows need beyond plain sampling
    spans: list[LatencySpan] | None = None  # those ended and not reported yet; None where the request is not traced

    def __post_init__(self) -> None:
        self.extras = extras_of(self)

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
        # A grammar's answer ends with an EOS token where nothing else may follow, even if the request ignores EOS.
        stops_at_eos = sampling.grammar is not None or not sampling.ignore_eos
        return cls(
            rid=message.rid,
            tokens=tokens,
            num_prompt_tokens=len(message.input_ids),
            sampling=sampling,
            stop_ids=frozenset(sampling.stop_token_ids) | (eos_ids if stops_at_eos else frozenset()),
            arrived=now,
            deadline=now + (timeout if message.deadline is None else min(timeout, message.deadline)),
            bootstrap=message.bootstrap,
            logprobs=RequestedLogprobs(message.top_logprobs_num, tuple(message.token_ids_logprob))
            if message.return_logprob else None,
            history=TokenHistory(tokens, begin, first=num_embeds) if sampling.penalizes else None,
            bias=LogitBias.of(sampling.logit_bias) if sampling.logit_bias else None,
            logprob_start=message.logprob_start_len if wants_prompt else None,
            spans=[] if message.traced else None,
            pooling=message.pooling,
            priority=message.priority,
            namespace=message.namespace,
            processor=None if message.processor is None else RowProcessor.of(
                message.processor.path, message.processor.params, RequestTokens(tokens, num_embeds, begin)),
            embeds=embeds,
            hidden=PositionRows(HIDDEN_STATE) if message.return_hidden_states else None,
            routed=PositionRows(ROUTED_EXPERTS) if message.return_routed_experts else None,
            sends_kv=message.sends_kv,
            slo_ttft=message.slo_ttft,
        )

    def __repr__(self) -> str:
        return (f"Req({self.rid}, prompt {self.num_prompt_tokens}, output {self.num_output_tokens}, "
                f"computed {self.num_computed_tokens})")

    @property
    def num_output_tokens(self) -> int:
        return self.tokens.count - self.num_prompt_tokens

    @property
    def length(self) -> int:
        """Number of tokens, pending ones included."""
        return self.tokens.count + self.num_pending

    @property
    def complete(self) -> bool:
        """True where the request has, or waits for, its last token by length."""
        return self.tokens.count + self.num_pending - self.num_prompt_tokens >= self.sampling.max_new_tokens

    @property
    def draft_gap(self) -> bool:
        """True where the draft model's pool lacks keys and values of computed tokens: nothing is drafted then."""
        return self.page_table is not None and self.page_table.draft_gap is not None

    @property
    def prompt(self) -> np.ndarray:
        return self.tokens.view(0, self.num_prompt_tokens)

    @property
    def prompt_digest(self) -> int:
        """A checksum by which the two servers of a pair verify that they have the same prompt, in one namespace."""
        start = zlib.crc32(self.namespace.asked.packed)  # the two have shown each other their weights
        return zlib.crc32(self.prompt.tobytes(), start if self.embeds is None else
                          zlib.crc32(self.embeds.tobytes(), start))

    def computed(self, lookahead: int = 0) -> np.ndarray:
        """The computed tokens, and up to ``lookahead`` after them, as far as they are known."""
        return self.tokens.view(0, self.num_computed_tokens + lookahead)

    @property
    def max_tokens(self) -> int:
        """Length that prompt and output may reach together."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens

    @property
    def prefix_limit(self) -> int:
        """Tokens that may be taken from the prefix cache when this engine samples the next token itself.

        The last token must be computed for its logits, as must every position whose prompt logprob is requested.
        """
        if self.pooling in ("mean", "cls"):
            return 0  # they read computed hidden states, which the cache does not have
        limit = len(self.tokens) - 1
        for rows in (self.hidden, self.routed):
            if rows is not None:
                limit = min(limit, rows.num_launched)
        if self.embeds is not None:
            return 0  # the cache identifies pages by their tokens
        if self.logprob_start is not None:
            num_computed = 0 if self.prompt_logprobs is None else len(self.prompt_logprobs.values)
            if self.logprob_start + num_computed < self.num_prompt_tokens:
                limit = min(limit, max(0, self.logprob_start + num_computed - 1))
        return limit

    def begin_prompt_logprobs(self) -> Logprobs:
        """Returns ``prompt_logprobs``, initialised where there are none yet: no token precedes the first one, so it has
        no log-probability."""
        if self.prompt_logprobs is None:
            first = [int(self.prompt[0])] if self.logprob_start == 0 else []
            self.prompt_logprobs = Logprobs(first, [None for _ in first], [[] for _ in first], [[] for _ in first])
        return self.prompt_logprobs

    def add_prompt_logprobs(self, more: Logprobs) -> None:
        """Append those of the next prompt tokens."""
        logprobs = self.begin_prompt_logprobs()
        logprobs.token_ids.extend(more.token_ids)
        logprobs.values.extend(more.values)
        logprobs.top.extend(more.top)
        logprobs.of_ids.extend(more.of_ids)

    def append_pending(self, *token_ids: int) -> list[int]:
        """Append the tokens of a step, of which the first was pending, up to one that ends the request; sets ``finish``
        then. Returns those to report."""
        self.num_pending -= 1
        reported = self.append_token(token_ids[0])
        for token_id in token_ids[1:]:
            if self.finish is not None:
                break
            reported += self.append_token(token_id)
            self.num_computed_tokens += 1
        return reported

    def append_token(self, token_id: int) -> list[int]:
        """Append a token; sets ``finish`` where it is the last. Returns the tokens to report: none where the request
        asks for the prompt alone."""
        limit = self.sampling.max_new_tokens
        if limit == 0:
            self.finish = Finish("length")
            return []
        self.tokens.append(token_id)
        if token_id in self.stop_ids:
            self.finish = Finish("stop", token_id)
        elif self.tokens.count - self.num_prompt_tokens >= limit:
            self.finish = Finish("length")
        return [token_id]

    def end_span(self, name: SpanName) -> None:
        """Record that a latency span ends now."""
        if self.spans is not None:
            self.spans.append(LatencySpan(name, time.monotonic()))

    @property
    def failure(self) -> ServingError | None:
        """The error where a finished output violates its grammar; None where it does not, and on ranks that sample no
        tokens, which send nothing."""
        if self.matcher is None or self.finish is None or self.finish.reason != "stop":
            return None
        return self.matcher.error_at_end()

    def take_extras(self, logprobs: Logprobs | None = None) -> OutputExtras | None:
        """Returns what the request reports besides its new tokens, whose ``logprobs`` are given; None where that is
        nothing. The first report says how many tokens the prompt has, and its log-probabilities."""
        if (self.reported and logprobs is None and self.finish is None and not self.spans and self.hidden is None
                and self.routed is None and self.embedding is None):
            return None
        first, self.reported = not self.reported, True
        spans, self.spans = self.spans or [], None if self.spans is None else []
        return OutputExtras(
            usage=PromptUsage(self.num_prompt_tokens, self.num_cached_tokens, self.loaded) if first else None,
            finish=self.finish,
            logprobs=logprobs, prompt_logprobs=self.prompt_logprobs if first else None, embedding=self.embedding,
            hidden_states=None if self.hidden is None else self.hidden.take(),
            routed_experts=None if self.routed is None else self.routed.take(), spans=spans)
