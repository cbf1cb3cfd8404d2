"""A prefill server whose layers are parted into stages: decode gets the pages of all, and a room ends with each."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from baton.common.api.errors import TransferFailed
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.sender.kv_sender import KVSender
from baton.tests.kvtransfer.conftest import HOST, regions_of, shareable, wait_until
from baton.tests.kvtransfer.test_tp import HEAD_DIM, NUM_PAGES, Fleet

COUNTS = (2, 1)  # layers of each stage


class Stages:
    """The ranks of a prefill server, stage by stage, in place of a Server's."""

    def __init__(self, fleet: Fleet, tp_size: int, page_size: int):
        self.whole = fleet.prefill.whole
        self.pools, self.ranks, first = [], [], 0
        for stage, count in enumerate(COUNTS):
            self.layout = KVLayout((count,), self.whole.shape[3] // tp_size, HEAD_DIM, page_size, "float32",
                                   first_layer=first, of_layers=sum(COUNTS))
            for rank in range(tp_size):
                heads = slice(rank * self.layout.num_kv_heads, (rank + 1) * self.layout.num_kv_heads)
                self.pools.append([shareable(self.whole[:, first:first + count, :, heads])])
                sender = KVSender(args=fleet.args, host=HOST, rank=rank, tp_size=tp_size, layout=self.layout,
                                  num_pages=NUM_PAGES, regions=regions_of(self.pools[-1]), pp_rank=stage,
                                  pp_size=len(COUNTS), backend=make_backend(fleet.backend))
                fleet.closers.callback(sender.close)
                self.ranks.append(sender)
            first += count


@pytest.fixture
def make_fleet():
    with contextlib.ExitStack() as stack:
        def make(p: int, d: int, groups: tuple[int, ...], backend: str = "fake", **args) -> Fleet:
            fleet = Fleet(1, d, 4, ((3,), groups), backend, **args)
            stack.callback(fleet.closers.close)
            fleet.prefill.ranks[0].close()
            fleet.prefill = Stages(fleet, p, fleet.prefill.layout.page_size)
            for sender in reversed(fleet.prefill.ranks):
                register_rank(fleet.bootstrap.url, sender.info, secret=fleet.args.cluster_secret)
            return fleet

        yield make


@pytest.mark.parametrize("backend", ["fake", "nixl"])
@pytest.mark.parametrize("p, d, groups", [(1, 1, (3,)), (1, 2, (1, 2)), (2, 1, (2, 1)), (2, 2, (3,))])
def test_decode_gets_the_layers_of_all_stages(make_fleet, backend, p, d, groups):
    fleet = make_fleet(p, d, groups, backend, kv_checksum="full")
    for room in range(2):
        fleet.transfer(room)
        assert all(receiver.result(room).token_id == 42 for receiver in fleet.decode.ranks)
    fleet.assert_pages()


def test_a_room_is_done_when_all_stages_are_and_ends_with_each(make_fleet):
    fleet = make_fleet(1, 1, (3,))
    receiver, last = fleet.decode.ranks[0], fleet.prefill.ranks[-1]
    fleet.reserve(1)
    fleet.expect(1)
    fleet.until(1, Phase.RESERVED)
    last._backend.fail_writes = 1
    fleet.push(1)
    fleet.until(1, Phase.FAILED, [receiver, last])
    assert isinstance(receiver.error(1), TransferFailed)
    fleet.until(1, Phase.FAILED)  # decode has informed the first stage
    fleet.transfer(2)


def test_one_stage_alone_is_no_server(make_fleet):
    fleet = make_fleet(1, 1, (3,), disaggregation_bootstrap_timeout=0.5)
    fleet.bootstrap.server.ranks.pop((0, 1, 0))
    fleet.reserve(1)
    wait_until(lambda: fleet.decode.ranks[0].phase(1) is Phase.FAILED)
    assert "not all of its ranks have registered" in fleet.decode.ranks[0].error(1).message


def test_a_stage_of_another_model_is_refused(make_fleet):
    fleet = make_fleet(1, 1, (3,))
    info = fleet.prefill.ranks[1].info
    larger = msgspec.structs.replace(info, layout=msgspec.structs.replace(info.layout, of_layers=4))
    register_rank(fleet.bootstrap.url, larger)
    fleet.reserve(1)
    wait_until(lambda: fleet.decode.ranks[0].phase(1) is Phase.FAILED)
    assert "num_layers of the KV layout is 3 here and 4 there" in fleet.decode.ranks[0].error(1).message
    assert np.array_equal(fleet.decode.pools[0][0], np.zeros_like(fleet.decode.pools[0][0]))
