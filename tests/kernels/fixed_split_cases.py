"""A token's row has the same bits in a decode step, in a prompt, and beside others. Run by test_kernels_interpreted.py,
in a process where Triton interprets its kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from baton.kernels import reference
from baton.kernels.attention import fixed_split_attention
from baton.kernels.attention.fixed_split_attention import plan_decode_rows, plan_rows, plan_verified_rows
from baton.kernels.attention.mla_verify import mla_verify
from baton.kernels.attention.verify_attention import plan_verify
from baton.kernels.tuning.attention import FixedSplitTile
from baton.kernels.tuning.policy import policy_of, set_batch_invariant
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.gpt_oss_models import save_gpt_oss
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    scattered_pages,
    server_config,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle,
         *options: object) -> TensorHandle:
    """A product whose rows do not depend on their place in the tile, as tensor cores'; the interpreter's is BLAS's."""
    product = np.einsum("ij,jk->ik", a.data.astype(np.float32), b.data.astype(np.float32))
    return TensorHandle(product + d.data, d.dtype.scalar)


@pytest.mark.parametrize(("window", "with_sinks", "stored", "softcap"), [
    (None, False, torch.float16, 0.0), (40, True, torch.float16, 0.0), (150, False, torch.float8_e4m3fn, 0.5)])
def test_decoded_verified_and_prompt_rows(monkeypatch, window, with_sinks, stored, softcap):
    """All rows of a prompt at once, in chunks of different lengths beside other requests, and each by itself. Splits
    are short, so that their size changes within the prompt."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(fixed_split_attention, "MIN_SPLIT", 64)
    monkeypatch.setattr(fixed_split_attention, "MAX_SPLITS", 2)
    dtype, lengths, page, heads, kv_heads, dim = torch.float16, [180, 37, 90], 16, 6, 2, 16
    pages = [-(-length // page) for length in lengths]
    k, v = (randn(sum(pages), kv_heads, page, dim, dtype=dtype, seed=seed).to(stored) for seed in (1, 2))
    q = [randn(length, heads, dim, dtype=dtype, seed=3 + b) for b, length in enumerate(lengths)]
    ids = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)).to(torch.int32).split(pages)
    sinks = randn(heads, dtype=torch.float32, seed=9) if with_sinks else None

    def attend(parts: list[tuple[int, int, int]], step: str = "prompts") -> list[torch.Tensor]:
        """Rows ``start:stop`` of request b, for each part; pages before a row's window are left out."""
        first = [0 if window is None else max(0, start + 1 - window) // page for _, start, _ in parts]
        counts, stops = [stop - start for _, start, stop in parts], torch.tensor([stop for *_, stop in parts])
        qo, kv = (torch.tensor([0, *values]).cumsum(0).to(torch.int32) for values in (
            counts, [-(-stop // page) - begin for (_, _, stop), begin in zip(parts, first)]))
        lengths = stops.numpy() - np.array(first) * page
        positions, group = torch.cat([torch.arange(start, stop) for _, start, stop in parts]), heads // kv_heads
        if step == "decode":
            rows = plan_decode_rows(len(parts), group, FixedSplitTile(16, 64, 4), 1000, window, CPU)
        elif step == "verify":
            rows = plan_verified_rows(qo, positions, max(counts), group, FixedSplitTile(16, 64, 4), 1000, window)
        else:
            rows = plan_rows(qo.numpy(), lengths, group, FixedSplitTile(64, 64, 4), window, CPU)
        indices = torch.cat([ids[b][begin:-(-stop // page)] for (b, _, stop), begin in zip(parts, first)])
        out = fixed_split_attention.fixed_split_attention(
            torch.cat([q[b][start:stop] for b, start, stop in parts]), k, v, rows, positions, qo, kv, indices,
            ((stops - 1) % page + 1).to(torch.int32), dim ** -0.5, 1.0, window, sinks, softcap=softcap)
        return list(out.split(counts))

    whole = attend([(b, 0, length) for b, length in enumerate(lengths)])
    for b, length in enumerate(lengths):
        table = [torch.tensor(x, dtype=torch.int32) for x in ([0, length], [0, pages[b]], [(length - 1) % page + 1])]
        expected = reference.paged_attention(q[b], k, v, table[0], table[1], ids[b], table[2], dim ** -0.5, 1.0, window,
                                             sinks, softcap=softcap)
        torch.testing.assert_close(whole[b].float(), expected.float(), atol=4e-3, rtol=4e-3)
    for parts in ([(0, 100, 131), (2, 89, 90), (1, 3, 37)], [(2, 60, 65), (0, 0, 180)],
                  [(0, 170, 178), (0, 127, 129)]):
        for (b, start, stop), found in zip(parts, attend(parts)):
            assert torch.equal(found, whole[b][start:stop]), (b, start, stop)
    for parts in ([(0, 125, 133), (2, 89, 90), (1, 30, 37)], [(0, 60, 66), (2, 63, 65), (1, 2, 8), (0, 172, 180)]):
        for (b, start, stop), found in zip(parts, attend(parts, "verify")):
            assert torch.equal(found, whole[b][start:stop]), (b, start, stop)
    tokens = [(0, 0), (0, 63), (0, 64), (0, 127), (0, 128), (0, 129), (0, 179), (1, 36), (2, 89)]
    for (b, at), found in zip(tokens, attend([(b, at, at + 1) for b, at in tokens], "decode")):
        assert torch.equal(found[0], whole[b][at]), (b, at)


def test_rows_over_latents(monkeypatch):
    """The rows of steps that verify drafts, of several lengths, and each by itself as a decode step's."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    lengths, q_lens, page, heads = [330, 37, 260], [3, 1, 4], 8, 3
    pages = [-(-length // page) for length in lengths]
    memory = randn(sum(pages), page, 24, dtype=torch.float16)
    ids = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)).to(torch.int32).split(pages)
    q, q_rope = (randn(sum(q_lens), heads, dim, dtype=torch.float16, seed=dim) for dim in (16, 8))
    policy = policy_of(CPU).attention

    def attend(parts: list[tuple[int, int, int]], rows: slice) -> torch.Tensor:
        """The last rows of requests: each part has one's index, number of tokens and number of rows."""
        tables = [ids[b][:-(-length // page)] for b, length, _ in parts]
        qo, kv = (torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (
            [count for *_, count in parts], [len(table) for table in tables]))
        last = torch.tensor([(length - 1) % page + 1 for _, length, _ in parts], dtype=torch.int32)
        most = max(count for *_, count in parts)
        tile = policy.mla_verify(heads, most, 2)
        plan = plan_verify(qo, kv, last, page, 1, 2, most, 400, tile, policy.mla_verify_splits(tile))
        return mla_verify(q[rows], q_rope[rows], memory, qo, kv, torch.cat(tables), last, 0.2, plan, tile)

    whole = attend(list(zip(range(3), lengths, q_lens)), slice(0, 8))
    row = 0
    for b, (length, count) in enumerate(zip(lengths, q_lens)):
        for own in range(length - count + 1, length + 1):
            assert torch.equal(attend([(b, own, 1)], slice(row, row + 1))[0], whole[row]), own
            row += 1


@pytest.mark.parametrize("family", ["GptOss", "DeepseekV3"])
def test_a_models_rows(monkeypatch, tmp_path, family):
    """A prompt whole, and in two chunks and a decode step: with windows, sinks and experts, or with latents."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    if family == "GptOss":
        model = save_gpt_oss(tmp_path, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1, vocab_size=97)
    else:
        model = save_deepseek(tmp_path, 3, num_hidden_layers=1, vocab_size=97)
    runner = load_runner(server_config(tmp_path, page_size=8, backend="triton"))
    tokens = np.random.default_rng(3).integers(0, 97, 24)
    pages = scattered_pages(runner, 2, 24)
    whole = forward(runner, [(tokens, 0, pages[0])])
    torch.testing.assert_close(whole, expected_logits(model, tokens), atol=1e-4, rtol=0)
    chunks = [forward(runner, [(tokens[start:stop], start, pages[1])]) for start, stop in ((0, 5), (5, 23), (23, 24))]
    assert torch.equal(torch.cat(chunks), whole)
