"""Attention of verify steps against its twin, on a GPU or under the interpreter; collected by
test_kernels_interpreted.py and tests/gpu/kernels/test_verify_attention.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.attention.mla.torch_backend import MLATorchBackend
from baton.common.attention.mla.triton_backend import MLATritonBackend
from baton.common.attention.torch_backend import TorchBackend
from baton.common.attention.triton_backend import TritonBackend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.config.mla import MLASpec
from baton.common.forward.forward_batch import Row, model_input
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.kernels import reference
from baton.kernels.arguments import RowMask
from baton.kernels.attention.current_kv import CurrentKV
from baton.kernels.attention.decode_plan import plan_decode
from baton.kernels.attention.mla_decode import mla_decode
from baton.kernels.attention.mla_verify import mla_verify
from baton.kernels.attention.move_slots import move_slots
from baton.kernels.attention.paged_decode import paged_decode
from baton.kernels.attention.verify_attention import VerifyPlan, plan_verify, verify_attention, verify_tile
from baton.kernels.tuning.attention import INVARIANT_SPLITS, DecodeSplits, DecodeTile, VerifyTile
from baton.tests.helpers.masked_steps import batch_of, random_tree, tree_columns
from baton.tests.kernels.kernel_cases import DEVICE, DTYPES, GPU, page_table, paged_pool, pytestmark, random

__all__ = ["pytestmark"]

Q_LENS, PREFIXES = [1, 5, 16, 2, 7], [0, 130, 7, 299, 64]


def random_words(counts: list[int], seed: int = 0) -> torch.Tensor:
    """Trees of ``counts`` nodes, whose parents are drawn at random among the nodes before."""
    generator, words = np.random.default_rng(seed), []
    for count in counts:
        tree: list[int] = []
        for node in range(count):
            parent = int(generator.integers(node)) if node else -1
            tree.append((tree[parent] if node else 0) | 1 << node)
        words += tree
    return torch.tensor(words, dtype=torch.int64, device=DEVICE)


def indptr(counts: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)).to(DEVICE)


def planned(table: list[torch.Tensor], rows: torch.Tensor, page_size: int, kv_heads: int, num_sms: int,
            tile: VerifyTile, window: int | None = None, masked: bool = False,
            splits: DecodeSplits | None = None) -> VerifyPlan:
    return plan_verify(rows, table[0], table[2], page_size, kv_heads, num_sms, int(rows.diff().max()), 400, tile,
                       splits or DecodeSplits(1 if num_sms == 1 else 8, 64), window, masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads,kv_heads,dim,page_size,num_sms,window,sinks,tile,softcap", [
    (6, 2, 16, 4, 1, None, False, VerifyTile(4, 32), 0.0), (6, 2, 16, 1, 100, None, True, VerifyTile(16, 16), 0.0),
    (8, 1, 64, 16, 100, 40, False, VerifyTile(5, 64), 0.0), (8, 1, 10, 16, 100, 70, True, VerifyTile(1, 32), 0.0),
    (4, 4, 32, 64, 100, None, False, VerifyTile(16, 32), 0.5), (5, 1, 16, 4, 1, 20, True, VerifyTile(16, 16), 0.0),
])
def test_verify_attention(heads, kv_heads, dim, page_size, num_sms, window, sinks, tile, softcap, masked):
    """Ragged rows, with no prefix and long ones, in one split and in several, rows of a request in one block and in
    several."""
    table = page_table([q + p for q, p in zip(Q_LENS, PREFIXES)], page_size, 900)
    pool, rows = paged_pool(900, kv_heads, page_size, dim, torch.float32), indptr(Q_LENS)
    q = random(sum(Q_LENS), heads, dim, dtype=torch.float32)
    given = random(heads, dtype=torch.float32, seed=8) * 4 if sinks else None
    mask = RowMask(random_words(Q_LENS), rows.diff()) if masked else None
    plan = planned(table, rows, page_size, kv_heads, num_sms, tile, window, masked)
    lengths = torch.empty_like(plan.length_indptr)
    reference.block_lengths(rows, table[0], table[2], lengths, page_size, plan.rows, plan.blocks_per_request, masked)
    assert plan.length_indptr.tolist() == lengths.tolist()
    assert num_sms == 1 or window or int(plan.splits.split_indptr.diff().max()) > 2
    got = verify_attention(q, *pool, rows, *table, dim**-0.5, plan, tile, window=window, sinks=given, mask=mask,
                           softcap=softcap)
    want = reference.paged_attention(q, *pool, rows, *table, dim**-0.5, 1.0, window, given,
                                     *(() if mask is None else (mask.words, mask.counts)), softcap=softcap)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_words_of_earlier_slots_too():
    """Draft passes attend to slots of earlier passes: words have more bits than the step has rows."""
    q_lens, counts = [2, 2, 1], [6, 2, 63]
    table = page_table([200, 40, 63], 4, 100)
    pool, rows = paged_pool(100, 1, 4, 16, torch.float32), indptr(q_lens)
    words = torch.tensor([0b010011, 0b101001, 0b01, 0b11, (1 << 62) + 5], dtype=torch.int64, device=DEVICE)
    mask = RowMask(words, torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    q, tile = random(5, 3, 16, dtype=torch.float32), VerifyTile(2, 16)
    plan = planned(table, rows, 4, 1, 100, tile, masked=True)
    got = verify_attention(q, *pool, rows, *table, 0.25, plan, tile, mask=mask)
    want = reference.paged_attention(q, *pool, rows, *table, 0.25, words=words, counts=mask.counts)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    pages = table[1][table[0][2]:].long()
    keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[0][[0, 2, 62]] for x in pool)
    alone = ((q[4] @ keys.T) * 0.25).softmax(-1) @ values
    torch.testing.assert_close(got[4], alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype,atol,rtol", DTYPES)
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.float8_e5m2])
def test_types(dtype, atol, rtol, stored):
    """The policy's own tile, pages of the queries' type and of float8 with scales; 65 slots and rows of a chain."""
    q_lens, lengths = [3, 1, 8], [300, 20, 65]
    table, rows = page_table(lengths, 16, 40), indptr(q_lens)
    pool = paged_pool(40, 2, 16, 64, torch.float32)
    pool = [(x * 0.5).to(stored or dtype) for x in pool]
    q = random(sum(q_lens), 8, 64, dtype=dtype)
    tile, splits = verify_tile(q, pool[0], 3, 8)
    plan = plan_verify(rows, table[0], table[2], 16, 2, 100, 8, 300, tile, splits._replace(min_tokens=64))
    got = verify_attention(q, *pool, rows, *table, 0.125 * 1.5, plan, tile, v_scale=0.75)
    want = reference.paged_attention(q, *(x.float() for x in pool), rows, *table, 0.125 * 1.5, 0.75)
    torch.testing.assert_close(got, want, atol=max(atol, 4e-3 if stored else 0), rtol=rtol)


def test_rows_alone_equal_decode_rows():
    """A block of one row, split as the batch-invariant policy splits it, is a decode row to the last bit."""
    q_lens, lengths = [4, 1, 6], [700, 40, 1300]
    table, rows = page_table(lengths, 16, 140), indptr(q_lens)
    pool = paged_pool(140, 2, 16, 32, torch.float32)
    q = random(sum(q_lens), 6, 32, dtype=torch.float32)
    tile = VerifyTile(1, 32)
    plan = plan_verify(rows, table[0], table[2], 16, 2, 100, 6, 1300, tile, INVARIANT_SPLITS)
    got = verify_attention(q, *pool, rows, *table, 0.2, plan, tile)
    for request, (count, length) in enumerate(zip(q_lens, lengths)):
        pages = table[1][table[0][request]:table[0][request + 1]]
        for row in range(count):
            own = length - count + row + 1
            used = pages[:-(-own // 16)]
            one = [torch.tensor([0, len(used)], dtype=torch.int32, device=DEVICE), used,
                   torch.tensor([(own - 1) % 16 + 1], dtype=torch.int32, device=DEVICE)]
            decode = plan_decode(one[0], one[2], 16, 2, 100, 1300, **INVARIANT_SPLITS._asdict())
            at = int(rows[request]) + row
            want = paged_decode(q[at:at + 1], *pool, *one, 0.2, decode, DecodeTile(32), inputs_ready=GPU)
            assert torch.equal(got[at:at + 1], want), (request, row)


def with_spare_pages(lengths: list[int], page_size: int, pages: int, spare: int) -> list[torch.Tensor]:
    """The page table of ``page_table``, with so many unused pages after each request's."""
    indptr, indices, last = page_table(lengths, page_size, pages - 1)
    listed = [torch.cat((x, x.new_full((spare,), pages - 1))) for x in indices.split(indptr.diff().tolist())]
    return [indptr + spare * torch.arange(len(indptr), dtype=torch.int32, device=DEVICE), torch.cat(listed),
            last - spare * page_size]


@pytest.mark.parametrize("page_size,spare,window", [(1, 3, None), (4, 2, 40), (16, 1, None)])
def test_more_pages_than_tokens(page_size, spare, window):
    """Decode rows, with and without keys of their own, verified chains and rows with words: the same bits as if no page
    were listed beyond the last token's; the unused page is poisoned."""
    lengths, heads, dim, tile = [3, 90, 64, 17], 2, 16, VerifyTile(4, 32)
    pool, rows = paged_pool(400, heads, page_size, dim, torch.float32), indptr([2, 3, 1, 4])
    for pages in pool:
        pages[399] = float("nan")
    q, fresh = random(10, 4, dim, dtype=torch.float32), random(4, 8, dim, dtype=torch.float32, seed=3)
    cos_sin = random(200, dim, dtype=torch.float32, seed=4)
    positions, mask = torch.tensor(lengths, device=DEVICE) - 1, RowMask(random_words([2, 3, 1, 4]), rows.diff())
    results = []
    for table in (page_table(lengths, page_size, 399), with_spare_pages(lengths, page_size, 400, spare)):
        decode = plan_decode(table[0], table[2], page_size, heads, 100, 200, min_tokens=64, window=window)
        own = [x.clone() for x in pool]
        current = CurrentKV(fresh[:, 4:6], fresh[:, 6:], cos_sin, positions, None)
        results.append([paged_decode(q[:4], *pool, *table, 0.25, decode, DecodeTile(16), window=window),
                        paged_decode(fresh[:, :4].clone(), *own, *table, 0.25, decode, DecodeTile(16), window=window,
                                     inputs_ready=GPU, current_kv=current), *(x[:399] for x in own)])
        for given in (None, mask):
            plan = planned(table, rows, page_size, heads, 100, tile, window, given is not None)
            results[-1] += [plan.length_indptr, verify_attention(q, *pool, rows, *table, 0.25, plan, tile,
                                                                 window=window, mask=given)]
    for want, got in zip(*results):
        assert torch.equal(want, got) and not got.isnan().any()


def test_more_pages_than_latents():
    lengths, heads = [3, 150, 64], 3
    pages, rows = random(90, 4, 24, dtype=torch.float32), indptr([2, 3, 1])
    pages[89] = float("nan")
    q, q_rope, tile = (random(6, heads, 16, dtype=torch.float32), random(6, heads, 8, dtype=torch.float32, seed=1),
                       VerifyTile(4, 32))
    results = []
    for table in (page_table(lengths, 4, 89), with_spare_pages(lengths, 4, 90, 2)):
        decode = plan_decode(table[0], table[2], 4, 1, 100, 150, min_tokens=64)
        plan = planned(table, rows, 4, 1, 100, tile)
        results.append([mla_decode(q[:3], q_rope[:3], pages, *table, 0.2, decode),
                        mla_verify(q, q_rope, pages, rows, *table, 0.2, plan, tile)])
    for want, got in zip(*results):
        assert torch.equal(want, got) and not got.isnan().any()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("form", ["heads", "latent"])
@pytest.mark.parametrize("masked", [False, True])
def test_backends(form, masked, window):
    """Steps of the Triton backends equal those of plain torch, in two layer groups and with rope."""
    if window and form == "latent":
        return
    layout = KVLayout((2, 1), 2 if form == "heads" else 1, 16, 4, "float32", form=form)
    pools = [KVPool(layout, 60, DEVICE) for _ in range(2)]
    mla = MLASpec(q_lora_rank=None, kv_lora_rank=12, nope_dim=6, rope_dim=4, v_dim=5, scale=0.3)
    backends = ([TorchBackend(pools[0], window), TritonBackend(pools[1], 4, window)] if form == "heads" else
                [MLATorchBackend(pools[0], mla), MLATritonBackend(pools[1], mla, 3, torch.float32)])
    generator, pages = np.random.default_rng(0), np.random.default_rng(1).permutation(60).reshape(3, 20)
    columns = tree_columns((0, 50, 21), [random_tree(size, generator) for size in (4, 1, 9)], pages, 4)
    if not masked:
        chain = model_input([Row([0] * q, p, ids) for q, p, ids in zip((4, 1, 9), (0, 50, 21), pages)], 4).columns
        columns = columns._replace(mask=None, positions=chain.positions)
    batch, workspace = batch_of(columns, torch.device(DEVICE)), AttentionWorkspace(torch.device(DEVICE))
    assert batch.last_tokens is None or not masked
    for pool in pools:
        for group in pool.groups:
            group.copy_(random(*group.shape, dtype=torch.float32, seed=5))
    table, up = random(80, 16 if form == "heads" else 4, dtype=torch.float32), random(3, 11, 12, dtype=torch.float32)
    results = []
    for backend in backends:
        assert backend.verifies(batch) is (backend is backends[1])
        plan = backend.plan(batch, workspace)
        for layer in range(3):
            rows = random(14, 128 if form == "heads" else 46, dtype=torch.float32, seed=layer)
            if form == "heads":
                q, k, v = (part.contiguous().unflatten(1, (-1, 16)) for part in rows.split([64, 32, 32], 1))
                results.append(plan.run(layer, q, k, v, table))
            else:
                q, latent, rope = rows.split([30, 12, 4], 1)
                results.append(plan.run(layer, q.clone().unflatten(1, (3, 10)), latent, rope, up, table))
    for want, got in zip(results[:3], results[3:]):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("heads,page_size,dim", [(3, 4, 6), (1, 1, 5), (9, 16, 8)])
def test_move_slots(heads, page_size, dim, dtype):
    """Paths whose targets are sources of later moves, one that stays, one of the first row alone."""
    pages = -(-20 // page_size)
    memory = random(pages, 2, 2, heads, page_size, dim, dtype=torch.float32).mul(9).to(dtype)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))[:20].to(DEVICE)
    table = slots // page_size, slots % page_size
    first_rows = torch.tensor([0, 6, 10, 11], device=DEVICE)
    paths = torch.tensor([[0, 2, 3, 5], [6, 7, 8, 20], [10, 20, 20, 20], [11, 14, 19, 99]], device=DEVICE)
    want = memory.clone()
    for target, source in [(1, 2), (2, 3), (3, 5), (12, 14), (13, 19)]:
        want[table[0][target], :, :, :, table[1][target]] = memory[table[0][source], :, :, :, table[1][source]]
    twin = memory.clone()
    move_slots(memory, *table, first_rows, paths)
    reference.move_slots(twin, *table, first_rows, paths)
    assert torch.equal(memory, want) and torch.equal(twin, want)
