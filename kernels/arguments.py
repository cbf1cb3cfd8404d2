"""Parameters of kernels and their twins that are no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

By = Literal["block", "row"]


class HeadNorms(NamedTuple):
    """Root-mean-square norms over each head, before rope is applied: weights [D] of queries and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class NormWeight(NamedTuple):
    """A root-mean-square norm: its ``weight`` [width]."""

    weight: torch.Tensor
    eps: float


class RowMask(NamedTuple):
    """A mask of the slots that the rows of a batch see. All of a request's rows see all slots but its last
    ``counts[b]`` ([B] int32, 64 at most), and of these the j-th where bit j of the row's word is set (``words`` [T]
    int64). The set bits are the row's ancestors and itself: as many tokens precede it as there are slots before, and
    other bits."""

    words: torch.Tensor
    counts: torch.Tensor


class Float8Format(NamedTuple):
    """The format of a float8 product's activations: a scale for each ``group`` of a row's values, of which the last may
    be smaller, or the one static scale ``known`` [1] for all."""

    group: int
    known: torch.Tensor | None = None


class Float8Rows(NamedTuple):
    """Quantized rows of ``dtype``: ``values`` [T, width] float8 (e4m3), contiguous, and ``scale`` float32
    [T, ceil(width / group)], contiguous over the tokens of a group, or [1]. A value times its scale is the original."""

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


class PackedInts(NamedTuple):
    """A weight [out, in] of integers in 4 or 8 ``bits``, or S of them, with S before all shapes.

    ``values`` uint8 [out, in * bits / 8], contiguous. Of 4 bits, each ``4 * quarter`` inputs are ``quarter`` words of
    16 bits (``reference.quarter_of(group, in)``): the inputs i, ``i + quarter``, ``i + 2 * quarter`` and
    ``i + 3 * quarter`` are the nibbles of word i, from its lowest on. ``scales`` int32 [groups, out] are those of
    ``group`` inputs, a multiple of 32 that divides ``in``: the bits of the scale in float32, of which the lowest 9 are
    the zero (``reference.scale_words``); a scale of float16 or bfloat16 lacks none. An input weighs
    ``(value - zero) * scale``, or with a ``table`` of ``reference.TABLES`` by its name ``table[value] * scale``, of 4
    bits.

    ``order`` int32 [2, in], where there is one: position p is input ``order[0, p]`` of the rows, in the group
    ``order[1, p]`` if the weight is ``indexed``, else in the group p // group."""

    values: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor | None
    bits: int
    group: int
    indexed: bool = False
    table: str = ""

    @property
    def width(self) -> int:
        """Inputs."""
        return self.values.shape[-1] * 8 // self.bits


class Int8Format(NamedTuple):
    """The format of an int8 product's activations: a scale for each token, or the one static ``scale`` [1] for all.
    ``asymmetric`` ones have a zero point, a static one the ``shift`` [1], its zero point times its scale."""

    asymmetric: bool = False
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None


class Int8Rows(NamedTuple):
    """Quantized rows of ``dtype``: ``values`` [T, width] int8, contiguous, ``scale`` float32 [T, 1] or [1], and with
    zero points ``shift`` of the same shape. A value times its scale, less the shift, is the original."""

    values: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None
    dtype: torch.dtype


class Choice(Protocol):
    """Parameters of routing, by which a token's experts are chosen, named as in ``common.config.moe.MoESpec``."""

    @property
    def top_k(self) -> int: ...

    @property
    def scoring(self) -> str: ...

    @property
    def jitter(self) -> float: ...

    @property
    def renormalize(self) -> bool: ...

    @property
    def scaling_factor(self) -> float: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def top_groups(self) -> int: ...

    @property
    def group_score(self) -> str: ...


@dataclass(frozen=True)
class Scales:
    """Float32 scales of float8 or int8 experts. ``block``, of float8 alone: one for 128 x 128 values, ``gate_up`` [S,
    ceil(2 * I / 128), ceil(H / 128)] and ``down`` [S, ceil(H / 128), ceil(I / 128)], where I is a multiple of 128.
    ``row``: one for an output, [S, 2 * I] and [S, H]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    by: By


class ExpertBiases(NamedTuple):
    """Biases of experts' products: ``gate_up`` [S, 2 * I] and ``down`` [S, H], contiguous."""

    gate_up: torch.Tensor
    down: torch.Tensor


class Mxfp4Weights(NamedTuple):
    """Matrices of S experts in MXFP4, contiguous uint8: ``packed`` [S, out, quads * group * 2] and ``scale`` [S, quads,
    out, 4], quads of four groups of inputs, with zeros after the last input; ``group`` is 32, or a power of two less.

    A quad's 16-bit word i has the value i of each of its groups (E2M1), in the bits that ``reference.mxfp4`` names.
    ``scale`` is the exponent of the group's power of two, 2**(scale - 221): such that an E2M1 value, read as the bits
    of a float with eight bits of exponent, times the float with this exponent, is the weight times 2**-32."""

    packed: torch.Tensor
    scale: torch.Tensor
    group: int = 32


@dataclass(frozen=True)
class Segment:
    """Pages ``[first_page, last_page)`` of the batch's ``kv_indices``, and the query rows that attend to them.

    ``table`` [B, 3] int32 has for each request: the index of its first token among the segment's tokens; how many
    tokens of it the segment has; and the position of its first query row's own token, counted from that first token:
    after the segment, within it, or (negative) before it. Block i of rows starts at row ``block_row[i]`` of request
    ``block_request[i]`` (int32).
    """

    first_page: int
    last_page: int
    table: torch.Tensor
    block_request: torch.Tensor
    block_row: torch.Tensor


class ChainPages(NamedTuple):
    """The pages of B requests: ``kv_indices`` [N] int32 from ``kv_indptr[b]`` to ``kv_indptr[b + 1]`` ([B + 1] int32)
    are request b's, at least one each, of ``page_size`` tokens. Slots beyond them are in ``scratch_page``. Positions
    are below ``max_length``."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    page_size: int
    scratch_page: int
    max_length: int


class KnownChains(NamedTuple):
    """Chains of B requests that the host knows: ``positions`` [B] of the newest tokens, ``tokens`` [B, width] these and
    their drafts, ``num_drafts`` [B]; int64, contiguous."""

    positions: torch.Tensor
    tokens: torch.Tensor
    num_drafts: torch.Tensor


CHAIN_COUNT, CHAIN_POSITION, CHAIN_DRAFTS, CHAIN_TOKENS = range(4)
"""The columns of a ChainState, whose last ones are its samples."""


class ChainState(NamedTuple):
    """The results of a step of chains, a row for each request: for the next step, which reads it on the device, and for
    the host, which copies ``packed`` [R, 4 + 2 * max_drafts + 1] int64 and reads it by the same names."""

    packed: torch.Tensor
    max_drafts: int

    @classmethod
    def empty(cls, rows: int, max_drafts: int, device: torch.device) -> ChainState:
        """Makes a state of ``rows`` requests that have no tokens."""
        return cls(torch.zeros(rows, CHAIN_TOKENS + 2 * (max_drafts + 1), dtype=torch.int64, device=device), max_drafts)

    @property
    def counts(self) -> torch.Tensor:
        """The tokens [R] that the step has given each request: the first of ``samples``."""
        return self.packed[:, CHAIN_COUNT]

    @property
    def positions(self) -> torch.Tensor:
        """The positions [R] of the newest tokens."""
        return self.packed[:, CHAIN_POSITION]

    @property
    def num_drafts(self) -> torch.Tensor:
        """The number of drafts [R] after the newest tokens."""
        return self.packed[:, CHAIN_DRAFTS]

    @property
    def tokens(self) -> torch.Tensor:
        """The newest tokens and the drafts [R, 1 + max_drafts]."""
        return self.packed[:, CHAIN_TOKENS:CHAIN_TOKENS + 1 + self.max_drafts]

    @property
    def samples(self) -> torch.Tensor:
        """The samples [R, 1 + max_drafts] of the step's rows; those of failed rows are negative."""
        return self.packed[:, CHAIN_TOKENS + 1 + self.max_drafts:]


class PlacedRows(NamedTuple):
    """``width`` rows of each of B requests, one after the other, in their pages; int64 but ``kv_last_page_len``.

    ``starts`` [B]: the position of each request's first row. ``positions`` [B * width] are below the pages'
    ``max_length``, ``page_of_token`` and ``offset_in_page`` [B * width] say where rows are stored, and
    ``kv_last_page_len`` [B] int32 counts the tokens in the last of a request's pages, where it has more pages than
    tokens none or less.
    """

    starts: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    page_of_token: torch.Tensor
    offset_in_page: torch.Tensor
    kv_last_page_len: torch.Tensor


class PlacedChains(NamedTuple):
    """``rows`` of a step of chains. Of each request the first ``valid`` [B] int64 are its newest token and drafts, the
    others void. ``sample_positions`` [B * width] int64: the position of the token that is sampled after each row."""

    rows: PlacedRows
    valid: torch.Tensor
    sample_positions: torch.Tensor


class DraftPasses(NamedTuple):
    """Rows of the passes of a drafter, one a request in each: pass a's is ``a`` positions after the request's newest
    token. All are [passes, B], as PlacedRows' of width 1."""

    positions: torch.Tensor
    page_of_token: torch.Tensor
    offset_in_page: torch.Tensor
    kv_last_page_len: torch.Tensor


class AcceptedChains(NamedTuple):
    """Accepted rows of a step of B chains; int64 but ``kv_last_page_len``.

    ``next_ids`` [B * width]: the sample of each row, of the vocabulary also where a row is void or has failed;
    ``sequences`` [B, 1 + width]: the first row's token and these. ``counts`` [B]: how many rows of each request are
    accepted, 0 where it has no valid ones; ``last_rows`` [B]: the last of these among all rows, the first one of a
    request without; ``newest_rows`` [B]: the newest token's among all ``sequences``. ``newest`` [B] are the newest
    tokens after the step, ``positions`` [B] theirs, and ``kv_last_page_len`` [B] int32 counts the tokens before them in
    the last of a request's pages. ``passes``: as many as there may be drafts, and one more.
    """

    next_ids: torch.Tensor
    sequences: torch.Tensor
    counts: torch.Tensor
    last_rows: torch.Tensor
    newest_rows: torch.Tensor
    newest: torch.Tensor
    positions: torch.Tensor
    kv_last_page_len: torch.Tensor
    passes: DraftPasses


class SimulatedCounts(NamedTuple):
    """Draws how many drafts are accepted: as many as there are ``thresholds`` [n] int64 above the upper 53 bits of a
    hash of the request's ``keys`` [B or more] int64 and the position of its newest token."""

    keys: torch.Tensor
    thresholds: torch.Tensor


class StateRuns(NamedTuple):
    """Runs of rows, one or none a request, that go on from states: run i has the rows ``begins[i]:ends[i]`` ([S] int32)
    of a step, at least one, begins with the state in page ``sources[i]`` ([S] int64; -1: zeros) and leaves its own in
    page ``targets[i]``, which may be the same page. No other run has it. ``max_rows`` are the most rows of a run.
    ``bounds`` [S, 2] are begins and ends in host memory; None: row i is run i."""

    begins: torch.Tensor
    ends: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    max_rows: int
    bounds: np.ndarray | None


@dataclass(frozen=True)
class DeltaNet:
    """Shape of a rank's gated delta network: ``num_heads`` key heads of ``key_dim`` values, each with ``group`` value
    heads of ``value_dim``; a convolution over ``taps`` tokens.

    Of each key head a state has, one after the other, the last ``taps - 1`` inputs of its ``channels`` [channels, taps
    - 1], those of its query, its key and its values, and the matrices [group, key_dim, value_dim] of its value heads.
    """

    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def conv_values(self) -> int:
        """Values of the convolution's part of a key head's state."""
        return self.channels * (self.taps - 1)

    @property
    def values(self) -> int:
        """Values of a key head's state."""
        return self.conv_values + self.group * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Mamba2:
    """Shape of a rank's Mamba-2 mixer: ``num_groups`` groups of ``heads`` heads each with ``head_dim`` values; the
    heads of a group share inputs and outputs of the state, ``state_dim`` values each. A convolution over ``taps``
    tokens.

    Of each group a state has, one after the other, the last ``taps - 1`` inputs of its ``channels`` [channels, taps -
    1], those of its heads, of B and of C, and the matrices [heads, head_dim, state_dim].
    """

    num_groups: int
    heads: int
    head_dim: int
    state_dim: int
    taps: int

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.state_dim

    @property
    def conv_values(self) -> int:
        """Values of the convolution's part of a group's state."""
        return self.channels * (self.taps - 1)

    @property
    def values(self) -> int:
        """Values of a group's state."""
        return self.conv_values + self.heads * self.head_dim * self.state_dim
