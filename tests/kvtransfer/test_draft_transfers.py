"""The draft model's pages travel with the model's, to the same page ids, between servers with the same draft model."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from baton.common.api.drafts import Drafts
from baton.common.api.errors import PairMismatch
from baton.common.api.identity import ModelIdentity
from baton.common.config.server import DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.endpoint import PairKey
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.messages import DraftInfo, PrefillResult, RankInfo
from baton.kvtransfer.protocol.reshard import make_group_plan, reader_ranks, writer_ranks
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender
from baton.tests.kvtransfer.conftest import BACKENDS, HOST, Bootstrap, regions_of, shareable, wait_until

NUM_PAGES, TOKENS, HEAD_DIM = 16, 27, 4
HEAD, OTHER = ModelIdentity("aa", "head"), ModelIdentity("bb", "other")
DRAFTS = Drafts((5, 6), (-1, -1))


def layout_of(heads: int, ranks: int, groups: tuple[int, ...], page_size: int) -> KVLayout:
    """No heads are latents; ranks share few heads."""
    return KVLayout(groups, max(1, heads // ranks), HEAD_DIM, page_size, "float32", "heads" if heads else "latent")


class Pool:
    """One rank's part of a cache ``[pages, layers, planes, heads, page size, head dim]``."""

    def __init__(self, whole: np.ndarray, layout: KVLayout, rank: int, ranks: int):
        first = rank * whole.shape[3] // ranks
        self.heads = slice(first, first + layout.num_kv_heads)
        self.groups = [shareable(part) for part in
                       np.split(whole[:, :, :, self.heads], np.cumsum(layout.groups)[:-1], axis=1)]


class Server:
    def __init__(self, fleet, build, ranks: int, heads: int, draft_heads: int | None, groups, page_size: int,
                 identity=HEAD, required=True):
        self.layout, self.endpoints, self.page_size = layout_of(heads, ranks, groups[0], page_size), [], page_size
        self.wholes, self.pools = [], []
        layouts = [self.layout]
        if draft_heads is not None:
            layouts.append(layout_of(draft_heads, ranks, groups[1], page_size))
        rng = np.random.default_rng(0)
        for layout, count in zip(layouts, (heads, draft_heads)):
            shape = (NUM_PAGES, layout.num_layers, layout.planes, max(1, count), page_size, HEAD_DIM)
            self.wholes.append(rng.random(shape, np.float32) if build is KVSender else np.zeros(shape, np.float32))
        for rank in range(ranks):
            pools = [Pool(whole, layout, rank, ranks) for whole, layout in zip(self.wholes, layouts)]
            memory = [group for pool in pools for group in pool.groups]
            draft = DraftInfo("EAGLE3", identity, layouts[1], required) if len(layouts) == 2 else None
            endpoint = build(args=fleet.args, host=HOST, rank=rank, tp_size=ranks, layout=self.layout,
                             num_pages=NUM_PAGES, regions=regions_of(memory), spare_page=NUM_PAGES - 1,
                             backend=make_backend(fleet.backend), draft=draft)
            fleet.closers.callback(endpoint.close)
            self.endpoints.append(endpoint)
            self.pools.append(pools)

    @property
    def num_groups(self) -> int:
        return sum(len(pool.groups) for pool in self.pools[0])


class Fleet:
    def __init__(self, backend="fake", prefill=None, decode=None, **args):
        self.backend = backend
        self.args = DisaggregationArgs(disaggregation_transfer_backend=backend, kv_checksum="full", **args)
        self.closers = contextlib.ExitStack()
        self.bootstrap = Bootstrap()
        self.closers.callback(self.bootstrap.close)
        one = {"ranks": 1, "heads": 2, "draft_heads": 2, "groups": ((2, 1), (1,)), "page_size": 4}
        self.prefill = Server(self, KVSender, **one | (prefill or {}))
        self.decode = Server(self, KVReceiver, **one | (decode or {}))
        for sender in self.prefill.endpoints:
            register_rank(self.bootstrap.url, sender.info)

    def reserve(self, room, first_page=0):
        pages = np.random.default_rng(room).permutation(NUM_PAGES - 1)
        self.src = pages[:self.prefill.layout.pages_for(TOKENS)]
        self.dst = pages[::-1][:self.decode.layout.pages_for(TOKENS)]
        for receiver in self.decode.endpoints:
            receiver.reserve(room, self.bootstrap.address, 77, TOKENS, first_page, self.dst[first_page:])

    def transfer(self, room, first_page=0, chunk=2):
        """Pushes page by page, the draft's after the model's."""
        self.reserve(room, first_page)
        for sender in self.prefill.endpoints:
            sender.expect(room, 77, TOKENS)
        every = [*self.prefill.endpoints, *self.decode.endpoints]
        wait_until(lambda: all(endpoint.phase(room) is Phase.RESERVED for endpoint in every))
        for sender in self.prefill.endpoints:
            for first in range(0, len(self.src), chunk):
                for group in range(self.prefill.num_groups):
                    sender.push(room, group, first, self.src[first:first + chunk], None)
            sender.finish(room, PrefillResult(42, 3, drafts=DRAFTS))
        wait_until(lambda: all(endpoint.phase(room) in (Phase.DONE, Phase.FAILED) for endpoint in every))
        for endpoint in every:
            assert endpoint.phase(room) is Phase.DONE, endpoint.error(room)
        results = [receiver.result(room) for receiver in self.decode.endpoints]
        assert all(result.token_id == 42 and result.drafts == DRAFTS for result in results)

    def assert_arrived(self, first_page=0, pools=2):
        """The tokens from ``first_page`` on are there in each pool, of each rank; the other pages are untouched."""
        begin = first_page * self.decode.page_size
        for rank in self.decode.pools:
            for index, pool in enumerate(rank):
                got = np.concatenate(pool.groups, axis=1)
                untouched = np.setdiff1d(np.arange(NUM_PAGES - 1), self.dst[first_page:])
                assert not got[untouched].any()
                if index >= pools:
                    assert not got[:NUM_PAGES - 1].any()
                    continue
                sent = by_token(self.prefill.wholes[index], self.src)[:, :, :, pool.heads]
                np.testing.assert_array_equal(by_token(got, self.dst)[begin:TOKENS], sent[begin:TOKENS])


def by_token(whole: np.ndarray, page_ids: np.ndarray) -> np.ndarray:
    pages = whole[page_ids].transpose(0, 4, 1, 2, 3, 5)
    return pages.reshape(-1, *pages.shape[2:])


@pytest.fixture
def make_fleet():
    with contextlib.ExitStack() as stack:
        def make(*args, **kwargs):
            fleet = Fleet(*args, **kwargs)
            stack.callback(fleet.closers.close)
            return fleet

        yield make


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads, draft_heads, prefill, decode", [
    (2, 2, {}, {}),
    (4, 2, {"ranks": 2}, {"ranks": 1, "groups": ((3,), (1,))}),
    (2, 4, {"ranks": 1, "groups": ((1, 2), (2,))}, {"ranks": 2, "groups": ((3,), (1, 1))}),
    (0, 4, {"ranks": 4}, {"ranks": 2}),  # latents go from two of the ranks, the draft's heads from all
    (4, 0, {"ranks": 2}, {"ranks": 4}),
    (0, 0, {"page_size": 8}, {"page_size": 4}),
    (4, 2, {"page_size": 4, "ranks": 2}, {"page_size": 8, "ranks": 1})], ids=str)
def test_pages_of_the_draft_arrive_with_the_models(make_fleet, backend, heads, draft_heads, prefill, decode):
    both = {"heads": heads, "draft_heads": draft_heads}
    fleet = make_fleet(backend, both | prefill, both | decode)
    fleet.transfer(1)
    fleet.assert_arrived()
    assert all(receiver.with_draft(1) for receiver in fleet.decode.endpoints)
    sent = sum(sender.counters["kv_bytes_sent"] for sender in fleet.prefill.endpoints)
    if not prefill and not decode:
        draft_bytes = fleet.prefill.endpoints[0].info.draft.layout.page_bytes
        assert sent == len(fleet.src) * (fleet.prefill.layout.page_bytes + draft_bytes)
        assert fleet.decode.endpoints[0].counters["kv_bytes_received"] == sent


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_missing_pages_travel(make_fleet, backend):
    fleet = make_fleet(backend)
    fleet.transfer(1, first_page=3)
    fleet.assert_arrived(first_page=3)


@pytest.mark.parametrize("decode", [
    {"draft_heads": None}, {"identity": OTHER, "required": False},
    {"draft_heads": 3, "groups": ((2, 1), (2,)), "required": False}], ids=str)
def test_pages_of_another_draft_stay(make_fleet, decode):
    """Decode does not draft, or computes prompts with its own draft model."""
    fleet = make_fleet("fake", decode=decode)
    fleet.transfer(1)
    fleet.assert_arrived(pools=1)
    assert not fleet.decode.endpoints[0].with_draft(1)


@pytest.mark.parametrize("prefill, decode, why", [
    ({"draft_heads": None}, {}, "give the prefill server the same --speculative-algorithm and draft model"),
    ({"identity": OTHER}, {}, "the draft model is head .fingerprint aa. here and other .fingerprint bb. there"),
    ({"groups": ((2, 1), (2,))}, {}, "of the draft model num_layers of the KV layout is 1 here and 2 there")])
def test_a_required_draft_that_prefill_lacks_is_refused(make_fleet, prefill, decode, why):
    fleet = make_fleet("fake", prefill, decode)
    fleet.reserve(1)
    receiver = fleet.decode.endpoints[0]
    wait_until(lambda: receiver.phase(1) is Phase.FAILED)
    assert isinstance(receiver.error(1), PairMismatch)
    with pytest.raises(PairMismatch, match=why):
        raise receiver.error(1)


def info(draft: DraftInfo | None = None, tp_size=1, rank=0, heads=2) -> RankInfo:
    return RankInfo("i", "tcp://x", rank, tp_size, layout_of(heads, tp_size, (1,), 4), "fake", draft=draft)


def draft(algorithm="EAGLE3", tp_size=1, heads=2, page_size=4, **options) -> DraftInfo:
    return DraftInfo(algorithm, HEAD, layout_of(heads, tp_size, (1,), page_size), **options)


def test_pairs_of_algorithms():
    assert info(draft()).mismatch(info(draft("NEXTN"))) == "--speculative-algorithm is EAGLE3 here and NEXTN there"
    assert info().mismatch(info(draft())) is None and not info().takes_draft_from(info(draft()))
    own = info(draft("STANDALONE", required=False))
    assert own.mismatch(info()) is None and not own.takes_draft_from(info())
    assert own.takes_draft_from(info(draft("STANDALONE", required=False)))


def test_peers_without_the_field_are_understood_and_bad_ones_are_not():
    old = msgspec.to_builtins(info())
    del old["draft"]
    assert msgspec.convert(old, RankInfo) == info()
    packed = m.encode(m.Hello(info(draft()), "i", 4, b""))
    assert m.decode_to_sender(packed).info.draft == draft()
    result = msgspec.to_builtins(PrefillResult(1, 2))
    result.pop("drafts")
    assert msgspec.convert(result, PrefillResult).drafts is None
    odd = msgspec.to_builtins(info(draft()))
    odd["draft"]["layout"]["page_size"] = 8
    with pytest.raises(msgspec.ValidationError, match="different numbers of tokens"):
        msgspec.convert(odd, RankInfo)


def test_ranks_that_exchange_pages_of_one_pool_only_have_plans_for_all():
    prefill = [info(draft(tp_size=4, heads=4), 4, rank, 0) for rank in range(4)]
    decode = [info(draft(tp_size=2, heads=4), 2, rank, 0) for rank in range(2)]
    layouts = m.pair_layouts(prefill[0], decode[0])
    pairs = {(i, j) for j in range(2) for i in writer_ranks(j, *layouts)}
    assert pairs == {(i, j) for i in range(4) for j in reader_ranks(i, *layouts)}
    assert {(0, 0), (1, 0), (2, 1), (3, 1)} < pairs
    plans = {(i, j): make_group_plan(i, layouts[0], j, layouts[1]) for i in range(4) for j in range(2)}
    assert {pair for pair, plan in plans.items() if plan is not None} == pairs
    blocks = {(plan.src_blocks, plan.dst_blocks) for plan in plans.values() if plan is not None}
    assert len(blocks) == 1 and len(blocks.pop()[0]) == 2
    carried = {pair for pair, plan in plans.items() if plan is not None and plan.ranges_of(1)}
    assert carried == {(0, 0), (1, 0), (2, 1), (3, 1)}


def test_servers_with_other_drafts_have_other_pair_keys():
    key = PairKey(None, make_backend("fake"), [])
    infos = [info(), info(draft()), info(draft("NEXTN")), info(draft(heads=4)), info(draft())]
    assert len({key.of(each) for each in infos}) == 4
