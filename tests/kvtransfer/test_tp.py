"""Prefill and decode with different numbers of ranks and other layer groups: every rank gets its heads, or both end."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from baton.common.api.errors import Aborted, DeadlineExceeded, TransferFailed
from baton.common.api.messages import Logprobs
from baton.common.config.server import DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender
from baton.tests.kvtransfer.conftest import BACKENDS, HOST, Bootstrap, regions_of, shareable, wait_until

NUM_PAGES, PAGE_SIZE, HEAD_DIM, LATENT = 16, 4, 4, 0
SRC, DST, TOKENS = np.array([11, 3, 4]), np.array([6, 7, 1]), 10
LOGPROBS = Logprobs([42], [-0.5])


class Server:
    """The ranks of a prefill or decode server, their pools views of one cache ``[pages, layers, planes, heads, ...]``;
    no heads are latents."""

    def __init__(self, fleet, build, tp_size: int, num_heads: int, groups: tuple[int, ...], seed: int | None,
                 page_size: int = PAGE_SIZE):
        form = "heads" if num_heads else "latent"
        self.layout = KVLayout(groups, max(1, num_heads // tp_size), HEAD_DIM, page_size, "float32", form)
        shape = (NUM_PAGES, sum(groups), self.layout.planes, max(1, num_heads), page_size, HEAD_DIM)
        whole = np.zeros(shape, np.float32) if seed is None else np.random.default_rng(seed).random(shape, np.float32)
        self.whole, self.pools, self.ranks = whole, [], []
        for rank in range(tp_size):
            mine = whole[:, :, :, self.heads(rank, tp_size)]
            self.pools.append([shareable(part) for part in np.split(mine, np.cumsum(groups)[:-1], axis=1)])
            endpoint = build(args=fleet.args, host=HOST, rank=rank, tp_size=tp_size, layout=self.layout,
                             num_pages=NUM_PAGES, regions=regions_of(self.pools[-1]),
                             backend=make_backend(fleet.backend))
            fleet.closers.callback(endpoint.close)
            self.ranks.append(endpoint)

    def heads(self, rank: int, tp_size: int) -> slice:
        first = rank * self.whole.shape[3] // tp_size
        return slice(first, first + self.layout.num_kv_heads)


class Fleet:
    def __init__(self, p: int, d: int, heads: int, groups=((2, 1), (2, 1)), backend="fake",
                 page_sizes=(PAGE_SIZE, PAGE_SIZE), **args):
        self.backend = backend
        self.args = DisaggregationArgs(disaggregation_transfer_backend=backend, **args)
        self.closers = contextlib.ExitStack()
        self.bootstrap = Bootstrap(secret=self.args.cluster_secret)
        self.closers.callback(self.bootstrap.close)
        self.prefill = Server(self, KVSender, p, heads, groups[0], seed=1, page_size=page_sizes[0])
        self.decode = Server(self, KVReceiver, d, heads, groups[1], seed=None, page_size=page_sizes[1])
        for sender in self.prefill.ranks:
            register_rank(self.bootstrap.url, sender.info, secret=self.args.cluster_secret)

    @property
    def endpoints(self):
        return [*self.prefill.ranks, *self.decode.ranks]

    def expect(self, room):
        for sender in self.prefill.ranks:
            sender.expect(room, 77, TOKENS)

    def reserve(self, room, ranks=None):
        for receiver in self.decode.ranks if ranks is None else ranks:
            receiver.reserve(room, self.bootstrap.address, 77, TOKENS, 0, DST)

    def until(self, room, phase, endpoints=None):
        return wait_until(lambda: all(endpoint.phase(room) is phase for endpoint in endpoints or self.endpoints))

    def push(self, room):
        for sender in self.prefill.ranks:
            for group in range(len(self.prefill.layout.groups)):
                sender.push(room, group, 0, SRC, None)

    def transfer(self, room):
        self.reserve(room)
        self.expect(room)
        self.until(room, Phase.RESERVED)
        self.push(room)
        for sender in self.prefill.ranks[::-1 if room % 2 else 1]:
            logprobs = LOGPROBS if sender.info.rank == 0 else None  # as the sampler does
            sender.finish(room, PrefillResult(42, 3, logprobs))
        self.until(room, Phase.DONE)

    def assert_pages(self):
        for rank, pools in enumerate(self.decode.pools):
            expected = np.zeros_like(self.decode.whole)
            expected[DST] = self.prefill.whole[SRC]
            got = np.concatenate(pools, axis=1)
            np.testing.assert_array_equal(got, expected[:, :, :, self.decode.heads(rank, len(self.decode.pools))])


@pytest.fixture
def make_fleet():
    with contextlib.ExitStack() as stack:
        def make(*args, **kwargs):
            fleet = Fleet(*args, **kwargs)
            stack.callback(fleet.closers.close)
            return fleet

        yield make


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p, d, heads, groups", [
    (1, 2, 4, ((2, 1), (2, 1))), (2, 1, 4, ((2, 1), (3,))), (2, 3, 6, ((1, 2), (2, 1))),
    (4, 2, 2, ((3,), (3,))), (2, 4, 2, ((3,), (1, 1, 1))), (1, 1, 2, ((3,), (1, 2))),
    (2, 2, LATENT, ((2, 1), (2, 1))), (2, 1, LATENT, ((3,), (3,))), (2, 3, LATENT, ((3,), (1, 2)))])
def test_every_decode_rank_gets_its_heads(make_fleet, backend, p, d, heads, groups):
    fleet = make_fleet(p, d, heads, groups, backend, kv_checksum="full", cluster_secret="words")
    for room in range(2):
        fleet.transfer(room)
        assert all(receiver.result(room).token_id == 42 for receiver in fleet.decode.ranks)
        assert fleet.decode.ranks[0].result(room).logprobs == LOGPROBS  # which answers for all
    fleet.assert_pages()
    page_bytes = sum(receiver.info.layout.page_bytes for receiver in fleet.decode.ranks)
    assert sum(sender.counters["kv_bytes_sent"] for sender in fleet.prefill.ranks) == 2 * len(SRC) * page_bytes


@pytest.mark.parametrize("p, d", [(2, 1), (1, 2)])
def test_a_failure_between_two_ranks_ends_all_of_the_room(make_fleet, p, d):
    fleet = make_fleet(p, d, 4)
    fleet.reserve(1)
    fleet.expect(1)
    fleet.until(1, Phase.RESERVED)
    fleet.prefill.ranks[-1]._backend.fail_writes = 1
    fleet.push(1)
    met = [*fleet.prefill.ranks[-1:], *fleet.decode.ranks]
    fleet.until(1, Phase.FAILED, met)
    assert all(isinstance(endpoint.error(1), TransferFailed) for endpoint in met)
    fleet.until(1, Phase.FAILED)
    fleet.transfer(2)


@pytest.mark.parametrize("p, d", [(2, 1), (1, 2)])
@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_an_abort_by_one_rank_reaches_the_ranks_that_it_exchanges_pages_with(make_fleet, p, d, by):
    fleet = make_fleet(p, d, 4)
    fleet.reserve(1)
    fleet.expect(1)
    fleet.until(1, Phase.RESERVED)
    fleet.push(1)
    getattr(fleet, by).ranks[0].abort(1, Aborted("the client left"))
    others = fleet.decode.ranks if by == "prefill" else fleet.prefill.ranks
    fleet.until(1, Phase.FAILED, [getattr(fleet, by).ranks[0], others[0]])
    for endpoint in fleet.endpoints:  # as the schedulers do when they see that one rank fails
        endpoint.abort(1, Aborted("the client left"))
    fleet.until(1, Phase.FAILED)
    for endpoint in fleet.endpoints:
        endpoint.forget(1)
    fleet.transfer(1)


def test_a_sender_waits_for_all_of_its_readers(make_fleet):
    fleet = make_fleet(1, 2, 4, disaggregation_bootstrap_timeout=0.5)
    fleet.reserve(1, fleet.decode.ranks[:1])
    fleet.expect(1)
    time.sleep(0.2)
    assert fleet.prefill.ranks[0].phase(1) is Phase.RESERVING
    fleet.until(1, Phase.FAILED, [fleet.prefill.ranks[0], fleet.decode.ranks[0]])
    assert isinstance(fleet.decode.ranks[0].error(1), DeadlineExceeded)
    fleet.transfer(2)
    fleet.assert_pages()


def test_a_server_that_comes_back_with_other_ranks_is_met_anew(make_fleet):
    fleet = make_fleet(2, 1, 4)
    fleet.transfer(1)
    for sender in fleet.prefill.ranks:
        sender.close()
    fleet.prefill = Server(fleet, KVSender, 1, 4, (3,), seed=2)
    fleet.bootstrap.server.ranks.clear()
    register_rank(fleet.bootstrap.url, fleet.prefill.ranks[0].info)
    fleet.transfer(2)
    fleet.assert_pages()
    assert len(fleet.decode.ranks[0]._core.connections.sessions) == 1


def test_one_link_that_breaks_ends_the_route(make_fleet):
    """The other prefill rank is alive, and its session is closed once it has said that it has drained."""
    fleet = make_fleet(2, 1, 4, peer_timeout=0.6)
    fleet.reserve(1)
    fleet.expect(1)
    fleet.until(1, Phase.RESERVED)
    fleet.prefill.ranks[1].close()
    fleet.until(1, Phase.FAILED, [fleet.prefill.ranks[0], fleet.decode.ranks[0]])
    wait_until(lambda: not fleet.decode.ranks[0]._core.connections.sessions)
    wait_until(lambda: not fleet.prefill.ranks[0]._core.sessions.open)
