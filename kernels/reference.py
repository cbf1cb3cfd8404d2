"""Plain-torch twins of the kernels: what each computes, and what a CPU runs.

Arithmetic is in float32 and rounded to the input's type once, at the end, as in the kernels.
"""

from __future__ import annotations

import ctypes
import math

import torch

from .forms import Choice, ExpertBiases, HeadNorms, Scales, Segment
from .gate import clamped_gate

FP8_LARGEST = 448.0  # of e4m3
FP8_LEAST = 1e-12  # magnitude that a scale is made for at least: a group of zeros has a scale too


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float,
            residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.rmsnorm.rmsnorm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, x


def copy_blocks(src_address: int, dst_address: int, ids: torch.Tensor, block_bytes: int) -> None:
    """See ``kernels.copy_blocks.copy_blocks``; of host memory."""
    for source, target in ids.T.tolist():
        ctypes.memmove(dst_address + target * block_bytes, src_address + source * block_bytes, block_bytes)


def peer_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """``parts`` are the ranks' in their order; see ``kernels.peer_sum.peer_sum``."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def peer_sum_norm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor,
                  eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.peer_sum.peer_sum_norm``."""
    return rmsnorm(peer_sum(parts), weight, eps, residual)


def peer_norm_gather(parts: list[torch.Tensor], residuals: list[torch.Tensor], weight: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See ``kernels.peer_rows.peer_norm_gather``; the second result is all ranks'."""
    made = [rmsnorm(part, weight, eps, residual) for part, residual in zip(parts, residuals)]
    return torch.cat([normed for normed, _ in made]), [total for _, total in made]


def peer_scatter_norm(parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float,
                      rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.peer_rows.peer_scatter_norm``; ``parts`` [ranks * n, width] are the ranks' summands."""
    return rmsnorm(peer_sum(parts).chunk(len(parts))[rank], weight, eps, residual)


def peer_dispatch(rows: list[torch.Tensor], numbers: list[torch.Tensor], most: int, places: int,
                  rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [ranks * most, width] and places [ranks * most, K] that come to ``rank``, zeros and -1 where nothing does;
    see ``kernels.peer_tokens.peer_dispatch``."""
    tokens, found = rows[0].new_zeros(len(rows), most, rows[0].shape[1]), []
    for source, (own, number) in enumerate(zip(rows, numbers)):
        place = number - rank * places
        place = torch.where((place >= 0) & (place < places), place, -1)
        wanted = (place >= 0).any(1)
        tokens[source, :len(own)][wanted] = own[wanted]
        found.append(torch.nn.functional.pad(place, (0, 0, 0, most - len(own)), value=-1))
    return tokens.flatten(0, 1), torch.cat(found)


def peer_combine(made: torch.Tensor, positions: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor,
                 places: int) -> torch.Tensor:
    """``[tokens, width]``: the sums that a rank sends, zeros of those it has no part in; see
    ``kernels.peer_tokens.peer_combine``."""
    total = torch.zeros(len(ids), made.shape[1], device=made.device)
    rows = torch.arange(ids.numel(), device=ids.device) if positions is None else positions.long()
    for choice in range(ids.shape[1]):
        here = (ids[:, choice] >= 0) & (ids[:, choice] < places)
        total[here] += made[rows.view(ids.shape)[here, choice]].float() * weights[here, choice, None]
    return total.to(made.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See ``kernels.silu_and_mul.silu_and_mul``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, D] turned by ``cos``, ``sin`` [T, D / 2]; element i pairs with element i + D / 2."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_and_store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                   page_of_token: torch.Tensor, offset_in_page: torch.Tensor,
                   cos_sin: torch.Tensor | None = None, positions: torch.Tensor | None = None,
                   k_scale: float = 1.0, v_scale: float = 1.0, norms: HeadNorms | None = None,
                   turn_keys: bool = False) -> None:
    """See ``kernels.rope_and_store.rope_and_store``."""
    given = k
    if norms is not None:
        q.copy_(rmsnorm(q, norms.q_weight, norms.eps)[0])
        k = rmsnorm(k, norms.k_weight, norms.eps)[0]
    if cos_sin is not None:
        assert positions is not None
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
        q.copy_(rotate(q, cos, sin))
        k = rotate(k, cos, sin)
    if turn_keys:
        given.copy_(k)
    k_pages[page_of_token, :, offset_in_page] = _stored(k, k_scale, k_pages.dtype)
    v_pages[page_of_token, :, offset_in_page] = _stored(v, v_scale, v_pages.dtype)


def _stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as pages of ``dtype`` hold it; of float8, what is beyond its largest value is cut off."""
    if dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def paged_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, qo_indptr: torch.Tensor,
                    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                    scale: float, v_scale: float = 1.0, window: int | None = None,
                    sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention over paged KV, request by request; see ``kernels.paged_prefill.paged_prefill``.

    Written for clarity, in float32 and with the whole score matrix.
    """
    out = torch.empty_like(q)
    page_size = k_pages.shape[2]
    group = q.shape[1] // k_pages.shape[1]
    for b in range(len(kv_last_page_len)):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        pages = kv_indices[int(kv_indptr[b]):int(kv_indptr[b + 1])].long()
        length = (len(pages) - 1) * page_size + int(kv_last_page_len[b])
        keys, values = (_tokens(x, pages, length).float().repeat_interleave(group, 0) for x in (k_pages, v_pages))
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), keys) * scale
        count = scores.shape[1]
        visible = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
        if window:
            visible = visible.triu(length - count - window + 1)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, -1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = (torch.einsum("hqk,hkd->qhd", weights, values) * v_scale).to(q.dtype)
    return out


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """See ``kernels.scale_by_sinks.scale_by_sinks``."""
    share = torch.sigmoid(lse * math.log(2) - sinks)
    out.copy_((out.float() * share[..., None]).to(out.dtype))


def plan_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, owners: torch.Tensor, firsts: torch.Tensor,
                page_size: int, wanted: int, shortest: int, turns: int = 1, window: int | None = None) -> None:
    """See ``kernels.decode_plan.plan_decode``."""
    lengths = (kv_indptr.diff() - 1) * page_size + kv_last_page_len
    if window:
        lengths = lengths.clamp(max=window)
    share = -(-int(lengths.sum()) // wanted)
    piece = max(shortest, share)
    counts = ((lengths + piece // 2) // piece).clamp(min=1)
    if -(-int(counts.sum()) // wanted) * int((-(-lengths // counts)).max()) > share + share // 8:
        piece = max(shortest, -(-share // turns))
        counts = ((lengths + piece // 2) // piece).clamp(min=1)
    firsts[0] = 0
    firsts[1:] = counts.cumsum(0)
    owners[:int(counts.sum())] = torch.arange(len(counts), dtype=owners.dtype,
                                              device=owners.device).repeat_interleave(counts)


def _tokens(pool: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Pages of one request as ``[heads, length, D]``."""
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]


def mla_rope_and_store(q: torch.Tensor, latent: torch.Tensor, k: torch.Tensor, pages: torch.Tensor,
                       page_of_token: torch.Tensor, offset_in_page: torch.Tensor, cos_sin: torch.Tensor,
                       positions: torch.Tensor, interleaved: bool, page_scale: float = 1.0) -> None:
    """See ``kernels.mla_rope_and_store.mla_rope_and_store``."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)

    def turn(x: torch.Tensor) -> torch.Tensor:
        if not interleaved:
            return rotate(x, cos, sin)
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(halves, cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    q.copy_(turn(q))
    row = torch.cat((latent, turn(k[:, None])[:, 0]), dim=-1)
    pages[page_of_token, offset_in_page] = _stored(row, page_scale, pages.dtype)


def mla_attention(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, qo_indptr: torch.Tensor,
                  kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                  scale: float, page_scale: float = 1.0) -> torch.Tensor:
    """``kernels.mla_decode.mla_decode`` for any rows: one shared head whose values are the first part of its keys."""
    keys = pages[:, None].float() * page_scale
    values = torch.nn.functional.pad(keys[..., :q.shape[2]], (0, q_rope.shape[2]))
    whole = paged_attention(torch.cat((q, q_rope), -1), keys, values, qo_indptr, kv_indptr, kv_indices,
                            kv_last_page_len, scale)
    return whole[..., :q.shape[2]].contiguous()


def mla_prefill(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, segment: Segment, qo_indptr: torch.Tensor,
                scale: float, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """See ``kernels.mla_prefill.mla_prefill``."""
    keys, values = kv.float().split([kv.shape[2] - out.shape[2], out.shape[2]], -1)
    keys = torch.cat((keys, k_rope.float()[:, None].expand(-1, kv.shape[1], -1)), -1)
    for b, (place, size, own) in enumerate(segment.table.tolist()):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        last = own + torch.arange(rows.stop - rows.start, device=q.device)
        seen = torch.arange(size, device=q.device) <= last[:, None]
        if not seen.any():
            continue
        scores = torch.einsum("qhd,khd->qhk", q[rows].float(), keys[place:place + size]) * scale
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        level = scores.logsumexp(-1)
        weights = (scores - level.masked_fill(level.isinf(), 0.0)[..., None]).exp()
        result = torch.einsum("qhk,khd->qhd", weights, values[place:place + size])
        if lse is not None:
            level = level * math.log2(math.e)
            joint = torch.logaddexp2(level, lse[rows])
            result = result * (level - joint).exp2()[..., None] + out[rows] * (lse[rows] - joint).exp2()[..., None]
            lse[rows] = joint
        out[rows] = result.to(out.dtype)


def quantize_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.fp8_quantize.quantize_groups``."""
    rows, width = x.shape
    groups = -(-width // group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - width)).view(rows, groups, group)
    scale = padded.abs().amax(-1).clamp(min=FP8_LEAST) / FP8_LARGEST
    q = (padded / scale[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return q.view(rows, -1)[:, :width].contiguous(), scale


def quantize_by(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """See ``kernels.fp8_quantize.quantize_by``."""
    return (x.float() / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def widen_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype,
                k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
    """See ``kernels.widen_pages.widen_pages``."""
    taken = [pages[ids.long()].float() * scale for pages, scale in ((k_pages, k_scale), (v_pages, v_scale))]
    return torch.stack(taken, 1).to(dtype)


def scaled_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                  dtype: torch.dtype) -> torch.Tensor:
    """See ``kernels.fp8_scaled_matmul.scaled_matmul``."""
    return (x.float() @ weight.float().T * x_scale * weight_scale).to(dtype)


def block_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                 block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """See ``kernels.fp8_block_matmul.block_matmul``."""
    wide = x.float() * _spread(x_scale, block[1], x.shape[1], dim=1)
    scale = _spread(_spread(weight_scale, block[0], weight.shape[0], dim=0), block[1], weight.shape[1], dim=1)
    return (wide @ (weight.float() * scale).T).to(dtype)


def skinny_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                  x_scale: torch.Tensor | None = None, scale: torch.Tensor | None = None,
                  dtype: torch.dtype | None = None) -> torch.Tensor:
    """See ``kernels.skinny_matmul.skinny_matmul``."""
    y = x.float() @ weight.float().T
    if x_scale is not None and scale is not None:
        y = y * x_scale * scale
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def greatest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.greatest.greatest``."""
    columns = x.argmax(-1)
    return x.gather(-1, columns[:, None])[:, 0], columns


def _spread(scale: torch.Tensor, size: int, total: int, dim: int) -> torch.Tensor:
    """Each scale repeated for the ``size`` values of its group, cut to ``total``."""
    return scale.repeat_interleave(size, dim).narrow(dim, 0, total)


def per_head_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """See ``kernels.per_head_matmul.per_head_matmul``; a view, its heads before its rows."""
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, places: torch.Tensor,
                weights: torch.Tensor, scales: Scales | None = None, biases: ExpertBiases | None = None,
                limit: float = 0.0) -> torch.Tensor:
    """Expert by expert of those that have a token; see ``kernels.moe_experts.moe_experts``."""
    def product(rows: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return torch.nn.functional.linear(rows, matrix)
        if scale.ndim == 1:
            return scaled_matmul(*quantize_groups(rows, rows.shape[1]), matrix, scale, rows.dtype)
        return block_matmul(*quantize_groups(rows, 128), matrix, scale, (128, 128), rows.dtype)

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    held = (places >= 0) & (places < gate_up.shape[0])
    for place in places[held].unique().tolist():
        tokens, choices = (places == place).nonzero(as_tuple=True)
        hidden = product(x[tokens], gate_up[place], None if scales is None else scales.gate_up[place])
        hidden = hidden if biases is None else hidden + biases.gate_up[place]
        hidden = clamped_gate(hidden, limit) if limit else silu_and_mul(hidden)
        made = product(hidden, down[place], None if scales is None else scales.down[place])
        made = made if biases is None else made + biases.down[place]
        total.index_add_(0, tokens, made.float() * weights[tokens, choices, None])
    return total.to(x.dtype)


def moe_align(places: torch.Tensor, num_places: int,
              block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(rows, place, positions)`` of the ``Alignment`` that ``kernels.moe_align.moe_align`` makes, without the blocks
    behind the last; positions of choices that are left out are -1."""
    flat = places.flatten()
    rows, place = [], []
    for expert in range(num_places):
        found = (flat == expert).nonzero()[:, 0]
        blocks = -(-len(found) // block)
        rows.append(torch.nn.functional.pad(found, (0, blocks * block - len(found)), value=len(flat)))
        place += [expert] * blocks
    joined = torch.cat(rows) if rows else flat[:0]
    positions = torch.full((len(flat) + 1,), -1, dtype=torch.int32, device=places.device)
    positions[joined] = torch.arange(len(joined), dtype=torch.int32, device=places.device)
    return joined.int(), torch.tensor(place, dtype=torch.int32, device=places.device), positions[:-1]


def moe_spans(place: torch.Tensor, tall: int) -> torch.Tensor:
    """The ``spans`` of blocks with these places, of which none is -1, without those behind the last."""
    found, first = [], 0
    for expert, blocks in zip(*torch.unique_consecutive(place, return_counts=True), strict=True):
        tiles = -(-int(blocks) // tall)
        for tile in range(tiles):
            begin, end = (at * int(blocks) // tiles for at in (tile, tile + 1))
            found.append((first + begin, end - begin, int(expert)))
        first += int(blocks)
    return torch.tensor(found, dtype=torch.int32, device=place.device).reshape(-1, 3)


def moe_topk(logits: torch.Tensor, bias: torch.Tensor | None, how: Choice,
             live: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.moe_topk.moe_topk``."""
    scores = logits.float().softmax(-1) if how.scoring == "softmax" else logits.float().sigmoid()
    choice = limit_to_groups(scores if bias is None else scores + bias, how)
    ids = choice.topk(how.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if how.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if live is not None:
        ids = ids.masked_fill((live == 0)[:, None], -1)
    return ids - first, weights * how.scaling_factor


def limit_to_groups(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """``choice`` [T, experts] with minus infinity for the experts of all but the ``top_groups`` best groups."""
    if how.top_groups == how.num_groups:
        return choice
    best = group_scores(choice, how).topk(how.top_groups, dim=-1).indices
    outside = torch.ones(choice.shape[0], how.num_groups, dtype=torch.bool, device=choice.device)
    outside = outside.scatter(1, best, False)[:, :, None].expand(-1, -1, choice.shape[1] // how.num_groups)
    return choice.masked_fill(outside.flatten(1), float("-inf"))


def group_scores(choice: torch.Tensor, how: Choice) -> torch.Tensor:
    """``[T, num_groups]`` of what tokens choose by: each group's best expert, or its two best added."""
    grouped = choice.unflatten(-1, (how.num_groups, -1))
    return grouped.topk(2, dim=-1).values.sum(-1) if how.group_score == "top2" else grouped.amax(-1)
