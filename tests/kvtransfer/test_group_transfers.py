"""Transfers of several cache groups: of layers with a sliding window only the pages that decode reads travel."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest

from baton.common.config.server import DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.endpoint import FurtherGroup
from baton.kvtransfer.protocol import messages as m
from baton.kvtransfer.protocol.messages import Hello, PrefillResult, RankInfo
from baton.kvtransfer.protocol.reshard import RankLayout, find_group_mismatch, make_group_plan
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.protocol.timing import Timing
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender, _bytes_of
from baton.kvtransfer.sender.sender_core import SenderCore
from baton.kvtransfer.sender.sender_state import Destination, DestinationPages, Send, SendTransfer, Session
from baton.kvtransfer.sender.write_queue import WriteQueue
from baton.tests.kvtransfer.conftest import BACKENDS, HOST, Bootstrap, regions_of, shareable, wait_until

HEADS, DIM, WINDOW, TOKENS, PAGES = 2, 4, 6, 45, 20
LAYERS = (1, 3), (0, 2)  # of the two cache groups; the second has a window


def content() -> np.ndarray:
    """``[layers, planes, heads, tokens, DIM]``: keys and values of the prompt."""
    return np.random.default_rng(0).random((4, 2, HEADS, TOKENS, DIM), np.float32)


class Rank:
    """One rank's pools: ``pools[g]`` is ``[pages, layers, planes, heads, page_size, DIM]`` of cache group g."""

    def __init__(self, rank: int, tp_size: int, page_size: int, stage: range, further_pages: int):
        self.rank, self.page_size, self.heads = rank, page_size, HEADS // tp_size
        self.layouts, self.layers = [], []
        for group, numbers in enumerate(LAYERS):
            here = [number for number in numbers if number in stage]
            self.layers.append(here)
            self.layouts.append(KVLayout(
                (1,) * len(here), self.heads, DIM, page_size, "float32", layers=tuple(here),
                first_layer=numbers.index(here[0]), of_layers=2 if len(here) < 2 else 0,
                windows=(WINDOW if group else None,) * len(here), retained_tokens=WINDOW if group else None))
        self.num_pages = [PAGES, further_pages]
        self.memory = [shareable(np.zeros((count, 1, 2, self.heads, page_size, DIM), np.float32))
                       for count, layout in zip(self.num_pages, self.layouts) for _ in layout.groups]

    def arguments(self, backend: str) -> dict:
        return {"rank": self.rank, "layout": self.layouts[0], "num_pages": PAGES, "spare_page": PAGES - 1,
                "further": [FurtherGroup(self.layouts[1], self.num_pages[1], self.num_pages[1] - 1)],
                "regions": regions_of(self.memory), "backend": make_backend(backend), "host": HOST}

    def cells(self, page_ids: list[np.ndarray], firsts: list[int]):
        """Yields layer, token, and the memory ``[planes, heads, DIM]`` of it, for the pages from ``firsts`` on."""
        flat = iter(self.memory)
        for numbers, ids, first in zip(self.layers, page_ids, firsts):
            for number in numbers:
                pages = next(flat)
                for token in range(first * self.page_size, TOKENS):
                    page, offset = divmod(token, self.page_size)
                    yield number, token, pages[ids[page - first], 0, :, :, offset]

    @property
    def own_heads(self) -> slice:
        return slice(self.rank * self.heads, (self.rank + 1) * self.heads)


def first_read_page(page_size: int) -> int:
    return (TOKENS + 1 - WINDOW) // page_size


@contextlib.contextmanager
def fleet(backend, p, d, page_sizes, stages=1):
    args = DisaggregationArgs(disaggregation_transfer_backend=backend, kv_checksum="full")
    bootstrap = Bootstrap()
    with contextlib.ExitStack() as stack:
        stack.callback(bootstrap.close)
        prefill = []
        for stage in range(stages):
            layers = range(stage * 4 // stages, (stage + 1) * 4 // stages)
            for rank in range(p):
                own = Rank(rank, p, page_sizes[0], layers, 9)
                sender = KVSender(args=args, tp_size=p, pp_rank=stage, pp_size=stages, **own.arguments(backend))
                stack.callback(sender.close)
                register_rank(bootstrap.url, sender.info)
                prefill.append((own, sender))
        decode = []
        for rank in range(d):
            own = Rank(rank, d, page_sizes[1], range(4), 7)
            receiver = KVReceiver(args=args, tp_size=d, **own.arguments(backend))
            stack.callback(receiver.close)
            decode.append((own, receiver))
        yield bootstrap, prefill, decode


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p,d,page_sizes,stages", [
    (1, 1, (4, 4), 1), (2, 1, (4, 4), 1), (1, 2, (4, 4), 1), (1, 1, (8, 4), 1), (2, 1, (4, 8), 1), (1, 1, (4, 4), 2)])
def test_what_decode_reads_arrives_and_nothing_else_is_written(backend, p, d, page_sizes, stages):
    rng, truth = np.random.default_rng(1), content()
    with fleet(backend, p, d, page_sizes, stages) as (bootstrap, prefill, decode):
        sent = [-(-TOKENS // page_sizes[0]), -(-TOKENS // page_sizes[1])]
        src_firsts, dst_firsts = [0, first_read_page(page_sizes[0])], [2, first_read_page(page_sizes[1])]
        src = [rng.permutation(count - 1)[:sent[0] - first] for count, first in zip((PAGES, 9), src_firsts)]
        dst = [rng.permutation(count - 1)[:sent[1] - first] for count, first in zip((PAGES, 7), dst_firsts)]
        for own, _ in prefill:
            for layer, token, cell in own.cells(src, src_firsts):
                cell[:] = truth[layer, :, own.own_heads, token]
        for _, receiver in decode:
            receiver.reserve(1, bootstrap.address, 77, TOKENS, dst_firsts[0], dst[0],
                             further=[(dst_firsts[1], dst[1])])
        for own, sender in prefill:
            sender.expect(1, 77, TOKENS)
            wait_until(lambda sender=sender: sender.phase(1) is Phase.RESERVED)
            for group, cache_group in enumerate(np.repeat([0, 1], [len(layers) for layers in own.layers])):
                sender.push(1, group, src_firsts[cache_group], src[cache_group], None)
            sender.finish(1, PrefillResult(42, 0))
        for _, endpoint in [*prefill, *decode]:
            wait_until(lambda endpoint=endpoint: endpoint.phase(1) is Phase.DONE)
        read_from = max(dst_firsts[0] * page_sizes[1], 0), TOKENS + 1 - WINDOW
        for own, _ in decode:
            for layer, token, cell in own.cells(dst, dst_firsts):
                if token >= read_from[layer in LAYERS[1]]:
                    assert np.array_equal(cell, truth[layer, :, own.own_heads, token]), (layer, token)
            for group, pages in enumerate(own.memory):
                unused = np.setdiff1d(np.arange(len(pages)), [*dst[group // 2], len(pages) - 1])
                assert not pages[unused].any(), "a page that was not reserved was written"


def gpt_oss(page_size: int = 16) -> list[KVLayout]:
    """gpt-oss-20b's: 24 layers, every other with a window of 128 tokens."""
    return [KVLayout((12,), 8, 64, page_size, "bfloat16", windows=(window,) * 12, layers=tuple(range(first, 24, 2)),
                     retained_tokens=window) for first, window in ((1, None), (0, 128))]


def info_of(layouts, **options) -> RankInfo:
    return RankInfo("i", "tcp://x", 0, 1, layouts[0], "fake", further_layouts=tuple(layouts[1:]), **options)


def planned_bytes(layouts: list[KVLayout], num_tokens: int, first_missing: int = 0) -> int:
    """Bytes of a prompt's transfer, as the sender counts the writes that it has queued."""
    info = info_of(layouts)
    plan = make_group_plan(0, info.group_layouts, 0, info.group_layouts)
    pages = layouts[0].pages_for(num_tokens)
    firsts = [max(first_missing, layout.first_retained_token(num_tokens) // layout.page_size) for layout in layouts]
    session = Session(b"s", info, plan, [m.FurtherPool(pages, None)] * len(layouts), 0.0, lease=1.0)
    destination = Destination(session, 1, 5, 77, num_tokens, [
        DestinationPages(first, np.arange(pages - first)) for first in firsts], 1.0)
    assert destination.flaw is None
    transfer = SendTransfer(1, 77, num_tokens, 0.0, 1.0, phase=Phase.WRITING)
    queue = WriteQueue(info)
    for group, layout in enumerate(layouts):
        first = layout.first_retained_token(num_tokens) // layout.page_size
        queue.add(transfer, destination, group, first, np.arange(pages - first), None)
    bytes_of = _bytes_of([layout.page_bytes for layout in layouts])
    return sum(bytes_of(write) for write in queue.take(0.0, lambda event: True))


def test_gpt_oss_sends_little_more_than_half_of_its_bytes():
    whole = [KVLayout((24,), 8, 64, 16, "bfloat16", windows=(128, None) * 12)]
    before, after = planned_bytes(whole, 8192), planned_bytes(gpt_oss(), 8192)
    assert before == 24 * 512 * whole[0].layer_page_bytes == 402_653_184
    assert after == 12 * (512 + 8) * whole[0].layer_page_bytes and after <= 0.55 * before
    assert planned_bytes(gpt_oss(), 100) == planned_bytes(whole, 100)
    assert planned_bytes(gpt_oss(), 8192, first_missing=510) == 24 * 2 * whole[0].layer_page_bytes


def test_servers_whose_groups_differ_are_refused():
    hybrid, whole = gpt_oss(), [KVLayout((24,), 8, 64, 16, "bfloat16", windows=(128, None) * 12)]
    assert info_of(hybrid).mismatch(info_of(hybrid)) is None
    assert info_of(hybrid).mismatch(info_of(whole)) == (
        "the KV cache has 2 groups of layers here and 1 there: give --disable-hybrid-swa-memory to both servers or to "
        "neither, and the same --context-length")
    assert info_of(hybrid, deterministic=True).mismatch(info_of(hybrid)) == (
        "--enable-deterministic-inference is on here and off there")
    swapped = [msgspec.structs.replace(layout, layers=other.layers) for layout, other in zip(hybrid, hybrid[::-1])]
    assert info_of(hybrid).mismatch(info_of(swapped)) == "layer 1 is here in the cache group of layer 0 there"
    wider = [hybrid[0], msgspec.structs.replace(hybrid[1], windows=(256,) * 12)]
    assert find_group_mismatch([RankLayout(1, layout) for layout in wider], info_of(hybrid).group_layouts) == (
        "the sliding window of layer 0 is 128 here and 256 there")
    assert make_group_plan(0, [], 0, []) is None


def test_messages_with_groups_and_without_are_read_and_bad_ones_are_not():
    hello = Hello(info_of(gpt_oss()), "i", 100, b"", further_pools=(m.FurtherPool(80, 79),))
    assert m.decode_to_sender(m.encode(hello)) == hello and [pool.num_pages for pool in hello.pools] == [100, 80]
    sender = SenderCore(hello.info, Timing.of(DisaggregationArgs()))
    sender.receive(b"s", msgspec.structs.replace(hello, further_pools=()), 0.0)
    refused = [effect.message.message for effect in sender.effects if isinstance(effect, Send)]
    assert refused and "1 pools are named there for 2 cache groups" in refused[0] and not sender.sessions.joining
    odd = msgspec.to_builtins(info_of(gpt_oss()))
    odd["further_layouts"][0]["page_size"] = 8
    with pytest.raises(msgspec.ValidationError, match="different numbers of tokens"):
        msgspec.convert(odd, RankInfo)
    reserve = m.Reserve(1, 5, 77, 10, 0, m.pack_page_ids(np.arange(3)))
    session = Session(b"s", hello.info, make_group_plan(0, hello.info.group_layouts, 0, hello.info.group_layouts),
                      hello.pools, 0.0)
    assert "is for 1 cache groups, and it has 2" in Destination.of(session, reserve, 1.0).flaw
    both = msgspec.structs.replace(reserve, num_prompt_tokens=40, further=(m.PageSpan(2, m.pack_page_ids([90])),))
    assert Destination.of(session, both, 1.0).flaw == "decode's reservation names pages outside its pool of 80"
