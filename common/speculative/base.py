"""Interfaces of speculative algorithms: they draft tokens that the model then verifies in one step.

A ``Proposer`` drafts on the host, from tokens alone, before a step. A ``Drafter`` drafts on the device at the end of
each step, with layers and a KV pool of its own. Either way a request's drafts are data, which the next step verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..api.drafts import Drafts
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..request.req import Req

if TYPE_CHECKING:
    import torch

    from ...kernels.arguments import AcceptedChains, PlacedChains
    from ..attention.workspace import AttentionWorkspace
    from ..distributed.parallel import Parallel
    from ..forward.chain_batches import ChainBatches
    from ..forward.forward_batch import ForwardBatch
    from ..kvcache.layout import KVLayout
    from ..kvcache.pool import KVPool
    from ..models.decoder.causal_lm import CausalLM
    from ..request.step_input import StepInput
    from ..weights.loader import Progress
    from ..weights.slots import Slot


class Proposer(Protocol):
    """Drafts the next tokens of requests from their tokens. All ranks of a tensor-parallel group must draft the same: a
    proposer reads no clock, and draws nothing."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Drafts | None]:
        """Returns for each request what may follow ``req.tokens``, at most ``limits[i]`` tokens, None for nothing.
        Called also for an outlook, after which no step verifies the drafts."""

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None:
        """Called once the model has accepted ``num_accepted`` of a request's drafts; they are among its tokens."""

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Called with requests that have ended."""


class Features(NamedTuple):
    """The model's hidden states that a drafter reads: those that enter ``layers``, with the residual added, side by
    side; without layers those after the final norm."""

    layers: tuple[int, ...] = ()


class DraftSampler(Protocol):
    """Samples drafts with the noise by which the model's own tokens will be sampled at the same positions."""

    def sample(self, logits: torch.Tensor, requests: Sequence[int], positions: Sequence[int], count: int = 1,
               token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ``count`` best tokens [n, count] int64 of ``logits`` [n, V], and the logarithms of their
        probabilities [n, count] float32.

        ``requests`` [n]: their index in the step; ``positions`` [n]: those of the sampled tokens, as
        SamplingMetadata's. ``token_ids`` [V] int64: the vocabulary's id of each column, for a reduced draft
        vocabulary."""


class DraftStep(NamedTuple):
    """A step as a drafter sees it, once the model has computed it and its tokens are sampled.

    ``batch``: the T rows that the model has computed, by ``step``; ``features`` [T, F]: what the drafter reads of them,
    if anything. ``next_ids`` [T] int64: the token that follows each row, where it is known to follow, else the
    one that was sampled after the row. ``counts`` and ``limits`` are of the requests in ``step.sample_index``: of the
    rows of a request's newest token and its drafts the first ``counts[i]`` are right, the others void; it may draft up
    to ``limits[i]`` tokens, for which its pages have room.
    """

    step: StepInput
    batch: ForwardBatch
    features: torch.Tensor | None
    next_ids: torch.Tensor
    counts: list[int]
    limits: list[int]
    sampler: DraftSampler


class Drafter(Protocol):
    """Drafts on the device."""

    def run(self, step: DraftStep) -> list[Drafts | None]:
        """Stores keys and values of the step's rows in the draft's pool, then drafts; returns the drafts of the
        requests in ``step.step.sample_index``. Called for every step, on all ranks of the attention group."""


class ChainSampler(Protocol):
    """Samples the drafts of a chain step, which may be captured in a CUDA graph."""

    def __call__(self, logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor | None = None,
                 token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Returns tokens [B] int64, contiguous, of ``logits`` [B, V], a row for each request, and writes them to
        ``out`` [B] too, of any stride. ``positions`` [B] int64: those of the sampled tokens; ``token_ids`` [V] int64:
        the vocabulary's id of each column, for a reduced draft vocabulary."""


class ChainStep(NamedTuple):
    """A chain step as a drafter sees it: all of it is on the device, at addresses that stay the same in every replay.

    ``placed`` are the B * width rows that the model has computed, and ``features`` [B * width, F] what the drafter
    reads of them, if anything; ``accepted`` says which are right, and places one pass for each draft, and one more.
    ``batches`` makes the batches of both. ``drafts`` [B, k] int64 is where the drafts are written. Requests have up to
    ``max_length`` tokens in their pages.
    """

    placed: PlacedChains
    accepted: AcceptedChains
    batches: ChainBatches
    features: torch.Tensor | None
    drafts: torch.Tensor
    sampler: ChainSampler
    max_length: int

    @property
    def num_drafts(self) -> int:
        return self.drafts.shape[1]

    def sample(self, logits: torch.Tensor, draft: int, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Samples draft number ``draft``, from 0, of ``logits`` [B, V], and writes it where it is asked for; returns
        the tokens [B]. ``token_ids`` are ChainSampler's."""
        asked = draft < self.num_drafts
        positions = self.accepted.passes.positions[min(draft + 1, self.num_drafts)]
        return self.sampler(logits, positions, self.drafts[:, draft] if asked else None, token_ids)


class ChainDrafter(Protocol):
    """A drafter whose chains are drafted without the host."""

    def draft_chains(self, step: ChainStep) -> None:
        """Does as ``run``: writes ``step.drafts``, also of requests that have no pages for them, which are stored in
        the scratch page; without drafts it stores keys and values alone. Waits for nothing, reads no host data, and
        keeps no memory."""


class DraftModel(Protocol):
    """The loaded weights of a drafter."""

    @property
    def features(self) -> Features | None:
        """The hidden states of the model that it reads; None if it reads tokens only."""

    @property
    def shifted(self) -> bool:
        """True if its keys and values at a position depend on the token after it too."""

    @property
    def layout(self) -> KVLayout:
        """The layout of its KV pool on this rank, whose pages have the ids of those of the model's first cache group.
        """

    def make_drafter(self, pool: KVPool, workspace: AttentionWorkspace) -> Drafter:
        """Makes the drafter over a pool of ``layout``."""

    def slots(self) -> Iterable[Slot]:
        """The slots of its own weights."""


@dataclass(frozen=True)
class DraftContext:
    """The model for which a draft model is loaded: the rank's ``model`` of ``spec``, in ``dtype``."""

    config: ServerConfig
    spec: ModelSpec
    parallel: Parallel
    model: CausalLM
    dtype: str
    device: torch.device
    progress: Progress


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm: one of the two. Those with ``load`` are registered with the trait "device", and "shifted"
    where their draft models are."""

    make_proposer: Callable[[ServerConfig], Proposer] | None = None
    load: Callable[[DraftContext], DraftModel] | None = None
