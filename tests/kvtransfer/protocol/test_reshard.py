"""Every head of every layer of every decode rank is written exactly once, from a prefill rank that holds it."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.reshard import (
    RankLayout,
    expand_blocks,
    find_mismatch,
    make_plan,
    reader_ranks,
    writer_ranks,
)

PAGE_SIZE, HEAD_DIM, PAGES = 2, 3, 3


def side(tp_size: int, num_heads: int, groups: tuple[int, ...], form: str = "heads") -> RankLayout:
    return RankLayout(tp_size, KVLayout(groups, max(1, num_heads // tp_size), HEAD_DIM, PAGE_SIZE, "float32", form))


def pools(server: RankLayout, num_heads: int, fill: bool) -> list[list[np.ndarray]]:
    """Of each rank and group; every element names its page, layer, plane, head and place."""
    shape = (PAGES, server.layout.num_layers, server.layout.planes, num_heads, PAGE_SIZE, HEAD_DIM)
    whole = np.arange(1, np.prod(shape) + 1).reshape(shape)
    ranks = []
    for rank in range(server.tp_size):
        first = rank * num_heads // server.tp_size
        mine = whole[:, :, :, first:first + server.layout.num_kv_heads]
        cuts = np.split(mine, np.cumsum(server.layout.groups)[:-1], axis=1)
        ranks.append([cut.copy() if fill else np.zeros_like(cut) for cut in cuts])
    return ranks


CASES = [(p, d, heads) for heads in (1, 2, 4, 6, 8) for p, d in itertools.product((1, 2, 3, 4, 6, 8), repeat=2)
         if all(heads % t == 0 or t % heads == 0 for t in (p, d))]


@pytest.mark.parametrize("groups", [((5,), (5,)), ((3, 2), (5,)), ((2, 2, 1), (1, 4))])
@pytest.mark.parametrize("p, d, heads", CASES)
def test_every_block_is_written_once_and_right(p, d, heads, groups):
    check_plans(side(p, heads, groups[0]), side(d, heads, groups[1]), heads)


@pytest.mark.parametrize("groups", [((5,), (5,)), ((2, 2, 1), (1, 4))])
@pytest.mark.parametrize("p, d", list(itertools.product((1, 2, 3, 4, 8), repeat=2)))
def test_each_decode_rank_gets_its_latents_from_one_prefill_rank(p, d, groups):
    prefill, decode = (side(size, 1, cut, "latent") for size, cut in zip((p, d), groups))
    check_plans(prefill, decode, 1)
    for j in range(d):
        carrying = [i for i in writer_ranks(j, [prefill], [decode]) if make_plan(i, prefill, j, decode).ranges]
        assert len(carrying) == 1
        assert p != d or carrying == [j]


@pytest.mark.parametrize("groups", [((5,), (5,)), ((2, 2, 1), (1, 4))])
@pytest.mark.parametrize("p, d", list(itertools.product((1, 2, 4), repeat=2)))
def test_states_are_cut_by_heads(p, d, groups):
    prefill, decode = (side(size, 4, cut, "state") for size, cut in zip((p, d), groups))
    check_plans(prefill, decode, 4)
    other = decode._replace(layout=msgspec.structs.replace(decode.layout, page_size=2 * PAGE_SIZE))
    assert "give both servers the same --page-size" in (find_mismatch(prefill, other) or "")


def check_plans(prefill: RankLayout, decode: RankLayout, heads: int) -> None:
    p, d = prefill.tp_size, decode.tp_size
    assert find_mismatch(prefill, decode) is None
    sources, targets, expected = (pools(prefill, heads, True), pools(decode, heads, False), pools(decode, heads, True))
    met = set()
    for j in range(d):
        for i in writer_ranks(j, [prefill], [decode]):
            met.add(i)
            assert j in reader_ranks(i, [prefill], [decode])
            plan = make_plan(i, prefill, j, decode)
            for block_range in plan.ranges:
                n, m = plan.src_blocks[block_range.src_group], plan.dst_blocks[block_range.dst_group]
                src = sources[i][block_range.src_group].reshape(PAGES * n, -1)
                dst = targets[j][block_range.dst_group].reshape(PAGES * m, -1)
                blocks = expand_blocks(np.arange(PAGES), m, block_range.dst)
                assert not dst[blocks].any(), "written twice"
                dst[blocks] = src[expand_blocks(np.arange(PAGES), n, block_range.src)]
    assert met == set(range(p)), "a prefill rank without a peer"
    for got, want in zip(itertools.chain(*targets), itertools.chain(*expected)):
        np.testing.assert_array_equal(got, want)


def test_equal_layouts_move_whole_pages_and_heads_stay_together():
    same = side(2, 8, (3, 2))
    assert make_plan(1, same, 1, same).src_blocks == (1, 1) and make_plan(0, same, 1, same) is None
    other_groups = make_plan(0, side(1, 8, (3, 2)), 0, side(1, 8, (5,)))
    assert other_groups.src_blocks == (3, 2) and other_groups.dst_blocks == (5,)
    transfers = make_plan(0, side(1, 8, (2,)), 1, side(2, 8, (2,)))
    assert transfers.src_blocks == (2 * 2 * 2,) and transfers.dst_blocks == (2 * 2,)


@pytest.mark.parametrize("change, words", [
    ({"form": "latent"}, "form of the KV layout is 'latent' here and 'heads' there"),
    ({"page_size": 3}, "page_size of the KV layout is 3 here and 2 there, and neither is a multiple of the other"),
    ({"head_dim": 4}, "head_dim of the KV layout is 4 here and 3 there"),
    ({"dtype": "bfloat16"}, "dtype of the KV layout is 'bfloat16' here and 'float32' there"),
    ({"channel_order": "ab"}, "the order of keys' channels is ab here and as in the model there: give both servers"),
    ({"groups": (4,)}, "num_layers of the KV layout is 4 here and 5 there"),
    ({"num_kv_heads": 3}, "num_kv_heads of the KV layout, 3 on each of 1 ranks here and 4 on each of 2 ranks there")])
def test_what_does_not_fit_is_named(change, words):
    prefill = side(2, 8, (5,))
    layout = {name: getattr(prefill.layout, name) for name in KVLayout.__struct_fields__} | change
    assert words in find_mismatch(prefill, RankLayout(1, KVLayout(**layout)))


def stages_of(whole: RankLayout, counts: tuple[int, ...]) -> list[RankLayout]:
    """A server's stages, each of so many layers."""
    firsts = np.cumsum([0, *counts])
    groups = [(count - count // 2, count // 2) if count > 1 else (count,) for count in counts]
    return [RankLayout(whole.tp_size, msgspec.structs.replace(whole.layout, groups=cut, first_layer=int(first),
                                                              of_layers=whole.layout.num_layers))
            for first, cut in zip(firsts, groups)]


@pytest.mark.parametrize("counts", [(3, 2), (1, 3, 1)])
@pytest.mark.parametrize("p, d", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("groups", [(5,), (2, 3)])
@pytest.mark.parametrize("form, heads", [("heads", 4), ("latent", 1)])
def test_stages_write_their_layers_of_every_decode_rank(p, d, counts, groups, form, heads):
    whole, decode = side(p, heads, (5,), form), side(d, heads, groups, form)
    sources, targets, expected = pools(whole, heads, True), pools(decode, heads, False), pools(decode, heads, True)
    cuts, first = set(), 0
    for stage, count in zip(stages_of(whole, counts), counts):
        assert find_mismatch(stage, decode) is None
        for j in range(d):
            for i in writer_ranks(j, [stage], [decode]):
                plan = make_plan(i, stage, j, decode)
                cuts.add(plan.dst_blocks)
                mine = np.split(sources[i][0][:, first:first + count], np.cumsum(stage.layout.groups)[:-1], axis=1)
                for block_range in plan.ranges:
                    n, m = plan.src_blocks[block_range.src_group], plan.dst_blocks[block_range.dst_group]
                    dst = targets[j][block_range.dst_group].reshape(PAGES * m, -1)
                    blocks = expand_blocks(np.arange(PAGES), m, block_range.dst)
                    assert not dst[blocks].any(), "written twice"
                    dst[blocks] = np.ascontiguousarray(mine[block_range.src_group]).reshape(PAGES * n, -1)[
                        expand_blocks(np.arange(PAGES), n, block_range.src)]
        first += count
    assert len(cuts) == 1, "all stages cut decode's pages alike"
    for got, want in zip(itertools.chain(*targets), itertools.chain(*expected)):
        np.testing.assert_array_equal(got, want)


def test_stages_of_another_model_do_not_fit():
    (_, last), decode = stages_of(side(1, 4, (5,)), (3, 2)), side(1, 4, (4,))
    assert find_mismatch(last, decode) == "num_layers of the KV layout is 4 here and 5 there (3 to 4 in this stage)"
    scaled = msgspec.structs.replace(last.layout, scales=((1.0, 1.0), (1.0, 2.0)))
    own = msgspec.structs.replace(side(1, 4, (5,)).layout, scales=((1.0, 1.0),) * 5)
    assert "in layer 4 are (1.0, 1.0) here and (1.0, 2.0) there" in find_mismatch(RankLayout(1, scaled),
                                                                                  RankLayout(1, own))


def test_windows_that_differ_are_named():
    prefill = side(1, 4, (2,))
    layout = {name: getattr(prefill.layout, name) for name in KVLayout.__struct_fields__} | {"windows": (None, 8)}
    assert find_mismatch(prefill, RankLayout(1, KVLayout(**layout))) == (
        "the sliding window of layer 1 is 8 here and None there")
