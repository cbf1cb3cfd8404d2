"""KV events: their wire format, a publisher over real sockets, and copies that follow it."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError
from baton.common.api.kv_events import (
    END_OF_REPLAY,
    TOPIC,
    Cleared,
    Removed,
    Stored,
    decode,
    decode_pages,
    encode,
    encode_pages,
    page_hashes,
)
from baton.common.api.namespace import SHARED, Namespace
from baton.common.config.server import (
    CacheArgs,
    DisaggregationArgs,
    EventsArgs,
    HttpArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
)
from baton.common.engine.kv_event_publisher import (
    HEARTBEAT_SECONDS,
    REPLAY_BUFFER_BATCHES,
    KVEventPublisher,
    start_publisher,
)
from baton.common.engine.tier_event_recorder import TierEventRecorder
from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.page_keys import namespace_key, page_keys
from baton.tests.helpers.ports import free_ports

PAGE = 4


# ---------------------------------------------------------------------- the form


class VLLMStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    """As vLLM's subscribers of 2025 declare it: fields without defaults must be there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class VLLMRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class VLLMCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class VLLMBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[VLLMStored | VLLMRemoved | VLLMCleared]


class MapStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """As vLLM's later releases write it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class MapBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list
    data_parallel_rank: int | None = None


EVENTS = [Stored([1, 2], None, [5, 6, 7, 8], 2), Removed([2]), Stored([3], 1, [9, 9], 2), Cleared()]


def test_batches_read_back():
    assert decode(encode(1.5, EVENTS)) == EVENTS


def test_peers_understand_our_batches():
    batch = msgspec.msgpack.decode(encode(1.5, EVENTS), type=VLLMBatch)
    assert batch == VLLMBatch(1.5, [VLLMStored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU"), VLLMRemoved([2], "GPU"),
                                    VLLMStored([3], 1, [9, 9], 2, None, "GPU"), VLLMCleared()])


def test_we_understand_theirs():
    """SGLang's arrays of five, vLLM's maps with hashes of bytes, a data-parallel rank after the events."""
    arrays = msgspec.msgpack.encode([1.0, [["BlockStored", [-7], None, [1, 2], 2, None], ["BlockRemoved", [-7]],
                                           ["AllBlocksCleared"], ["NewEvent", 3]], 0])
    assert decode(arrays) == [Stored([-7], None, [1, 2], 2), Removed([-7]), Cleared()]
    maps = msgspec.msgpack.encode(MapBatch(1.0, [
        MapStored([b"x"], b"p", [1, 2], 2, None, "GPU", None), MapStored([b"x"], None, [1, 2], 2, None, "TAPE", None),
        MapStored([b"x"], None, [1, 2], 2, 3, "GPU", "lora"), MapStored([b"x"], None, [1, 2], 2, None, "GPU", None, 1),
    ], 2))
    assert decode(maps) == [Stored([b"x"], b"p", [1, 2], 2)]


@pytest.mark.parametrize("extra_keys, read", [([None], True), (None, True), ([["salt"]], False)])
def test_pages_with_extra_keys_are_left_out(extra_keys, read):
    """Their content depends on more than their tokens: vLLM names a prompt's salt at its first page."""
    event = ["BlockStored", [b"x"], None, [1, 2], 2, None, "GPU", None, extra_keys]
    assert bool(decode(msgspec.msgpack.encode([1.0, [event]]))) is read


@given(st.binary(max_size=40) | st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.just("BlockStored") | st.just("BlockRemoved"),
    lambda inner: st.lists(inner, max_size=5)).map(msgspec.msgpack.encode))
def test_malformed_batches_are_refused(payload):
    try:
        assert isinstance(decode(payload), list)
    except ValueError:
        pass


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_equal_hashes_mean_equal_prefixes(tokens, cut, page_size):
    hashes = page_hashes(tokens, page_size)
    assert len(hashes) == len(tokens) // page_size
    pages = cut // page_size
    assert page_hashes(tokens[:cut], page_size) == hashes[:pages]
    if 0 < pages <= len(hashes):
        assert page_hashes(tokens[pages * page_size:], page_size, hashes[pages - 1]) == hashes[pages:]
    if tokens:
        assert page_hashes([tokens[0] ^ 1, *tokens[1:]], page_size)[:1] != hashes[:1] or not hashes


@pytest.mark.parametrize("pages", [0, 1, 63, 64, 65, 1000])
def test_encoded_pages_are_spread_and_end_with_the_last(pages):
    tokens = list(range(pages * PAGE + 2))
    decoded = decode_pages(encode_pages(tokens, PAGE))
    hashes = page_hashes(tokens, PAGE)
    assert (decoded.pages, decoded.page_size) == (pages, PAGE)
    assert decoded.hashes == [(page, hashes[page - 1]) for page, _ in decoded.hashes]
    assert min(pages, 32) <= len(decoded.hashes) <= 65
    assert not pages or decoded.hashes[-1][0] == pages
    assert len(encode_pages(tokens, PAGE)) < 2048


# ---------------------------------------------------------------------- the publisher


class Copy:
    """A subscriber's copy of the cache: hash -> tokens of its page."""

    def __init__(self):
        self.pages: dict[int, tuple[int, ...]] = {}

    def apply(self, events) -> None:
        for event in events:
            if isinstance(event, Stored):
                for i, value in enumerate(event.hashes):
                    self.pages[value] = tuple(event.token_ids[i * event.page_size:(i + 1) * event.page_size])
            elif isinstance(event, Removed):
                for value in event.hashes:
                    del self.pages[value]
            else:
                self.pages.clear()


def pages_of(manager: KVCacheManager) -> dict[int, tuple[int, ...]]:
    """The content of the cache itself, from paths alone: hash -> tokens of its page."""
    pages = {}
    for node in manager.prefix_cache._nodes():
        path, step = [], node
        while step.parent is not None:
            path.insert(0, step.tokens)
            step = step.parent
        tokens = np.concatenate(path).tolist()
        for i, value in enumerate(page_hashes(tokens, PAGE, node.namespace.seed)):
            pages[value] = tuple(tokens[i * PAGE:(i + 1) * PAGE])
    return pages


class Followed:
    """A cache, its publisher, and sockets of a subscriber."""

    def __init__(self, num_pages: int = 64):
        self.port = free_ports(2)[0]
        self.manager = KVCacheManager(num_pages, PAGE)
        self.publisher = self.make_publisher()
        self.context = zmq.Context()
        self.now = 0.0
        self.copy = Copy()
        self.last = None

    def make_publisher(self) -> KVEventPublisher:
        return KVEventPublisher(self.manager.prefix_cache, "127.0.0.1", self.port)

    def subscribe(self) -> zmq.Socket:
        socket = self.context.socket(zmq.SUB)
        socket.subscribe(TOPIC)
        socket.connect(f"tcp://127.0.0.1:{self.port}")
        for _ in range(100):  # until the subscription has arrived
            self.flush(HEARTBEAT_SECONDS)
            if socket.poll(20):
                return socket
        raise AssertionError("the subscription did not arrive")

    def flush(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.publisher.flush(self.now)

    def follow(self, socket: zmq.Socket) -> list[int]:
        """Apply all batches that arrive; returns their numbers."""
        numbers = []
        while socket.poll(100):
            topic, number, payload = socket.recv_multipart()
            assert topic == TOPIC
            numbers.append(int.from_bytes(number, "big"))
            self.copy.apply(decode(payload))
        return numbers

    def ask(self, first: int) -> list[tuple[int, list]]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.port + 1}")
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        answers = []
        for _ in range(200):
            self.publisher.flush(self.now)
            while socket.poll(10):
                _, number, payload = socket.recv_multipart()
                if number == END_OF_REPLAY:
                    socket.close()
                    return answers
                answers.append((int.from_bytes(number, "big"), decode(payload)))
        raise AssertionError("no end of the replay")

    def compute(self, tokens, namespace: Namespace = SHARED) -> None:
        """Run a request through the cache."""
        array = np.array(tokens, np.int32)
        table = self.manager.match_prefix(array, len(array), namespace)
        assert self.manager.allocate_slots(table, len(array))
        self.manager.release(table, array)

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def followed():
    made = Followed()
    yield made
    made.close()


def some_prompts(count: int, seed: int = 0):
    """Prompts of a few families, so that they share, split and evict."""
    rng = Random(seed)
    for _ in range(count):
        family = Random(rng.randrange(4))
        yield [family.randrange(99) for _ in range(rng.randrange(1, 40))] + [rng.randrange(99) for _ in range(9)]


def test_a_subscriber_has_what_the_cache_has(followed):
    socket = followed.subscribe()
    followed.follow(socket)
    for i, prompt in enumerate(some_prompts(150)):
        followed.compute(prompt, Namespace("salt") if i % 4 == 1 else SHARED)
        if i % 3 == 0:
            followed.flush()
    followed.flush()
    numbers = followed.follow(socket)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert followed.copy.pages == pages_of(followed.manager)
    assert len(followed.copy.pages) == followed.manager.num_cached > 30
    followed.manager.flush()
    followed.flush()
    followed.follow(socket)
    assert followed.copy.pages == {}


def test_equal_tokens_of_two_namespaces_have_unequal_hashes(followed):
    """The first page of a namespace follows its seed, so that no reader takes it for one of all requests; the salt is
    not sent."""
    socket = followed.subscribe()
    followed.follow(socket)
    for namespace in (SHARED, Namespace("s3cret"), Namespace(extra_key="s3cret"), Namespace("s3cre", "t")):
        followed.compute(range(8), namespace)
    followed.flush()
    _, _, payload = socket.recv_multipart()
    stored = decode(payload)
    assert len({value for event in stored for value in event.hashes}) == 8 and b"s3cre" not in payload
    assert [event.parent for event in stored][:2] == [None, Namespace("s3cret").seed]


def test_a_late_subscriber_gets_everything_in_one_batch(followed):
    for i, prompt in enumerate(some_prompts(100)):
        followed.compute(prompt, Namespace("salt") if i % 4 == 1 else SHARED)
        followed.flush()
    ((number, events),) = followed.ask(0)
    assert isinstance(events[0], Cleared)
    followed.copy.pages = {1: ()}
    followed.copy.apply(events)
    assert followed.copy.pages == pages_of(followed.manager)
    assert number == followed.publisher._number


def test_a_gap_is_replayed_from_the_replay_buffer(followed):
    followed.flush()
    first = followed.publisher._number + 1
    for prompt in some_prompts(20):
        followed.compute(prompt)
        followed.flush()
    answers = followed.ask(first + 5)
    assert [number for number, _ in answers] == list(range(first + 5, first + 20))
    assert not any(isinstance(event, Cleared) for _, events in answers for event in events)
    assert followed.ask(first + 20) == []


def test_batch_numbers_of_another_instance_get_a_snapshot(followed):
    followed.compute(range(40))
    followed.flush()
    for stranger in (1, followed.publisher._number + 1000):
        ((_, events),) = followed.ask(stranger)
        assert [type(event) for event in events] == [Cleared, Stored]


def test_the_replay_buffer_is_bounded(followed):
    for _ in range(REPLAY_BUFFER_BATCHES + 50):
        followed.flush(HEARTBEAT_SECONDS)
    assert len(followed.publisher._replay_buffer) == REPLAY_BUFFER_BATCHES


def test_heartbeats_are_sent_while_nothing_changes(followed):
    socket = followed.subscribe()
    followed.follow(socket)
    for _ in range(9):
        followed.flush(HEARTBEAT_SECONDS / 4)
    assert len(followed.follow(socket)) == 2


def test_malformed_replay_requests_are_ignored(followed):
    socket = followed.context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{followed.port + 1}")
    for frames in ((b"x",), (b"", b"short"), (b"", b"1" * 8, b"more")):
        socket.send_multipart(frames)
    assert followed.ask(0)


def config(**events) -> ServerConfig:
    return ServerConfig(ModelArgs("m"), CacheArgs(), ScheduleArgs(), ParallelArgs(), KernelArgs(), DisaggregationArgs(),
                        HttpArgs(), EventsArgs(**events))


def test_nothing_is_recorded_without_a_listener():
    manager = KVCacheManager(8, PAGE)
    assert start_publisher(config(), manager.prefix_cache) is None
    assert manager.prefix_cache.listeners == []


def test_a_publisher_that_cannot_start_gives_the_reason(followed):
    with pytest.raises(ConfigError, match="--kv-events-port needs ports"):
        start_publisher(config(kv_events_port=followed.port), KVCacheManager(8, PAGE).prefix_cache)
    with pytest.raises(ConfigError, match="disable-radix-cache"):
        start_publisher(config(kv_events_port=free_ports(2)[0]), None)
    with pytest.raises(ConfigError, match="65534"):
        config(kv_events_port=65535)


# ---------------------------------------------------------------------- tiers


def test_media_travel_under_the_names_of_peers():
    events = [Stored([1], None, [5, 6], 2, "CPU_PINNED"), Removed([1], "DISK")]
    assert decode(encode(1.0, events)) == events
    theirs = [["BlockStored", [b"a"], None, [], 0, None, "CPU", None], ["BlockRemoved", [7], "CPU_TIER1"],
              ["BlockRemoved", [8], "STORAGE"], ["BlockRemoved", [9], "TAPE"]]
    assert decode(msgspec.msgpack.encode([1.0, theirs])) == [
        Stored([b"a"], None, [], 1, "CPU_PINNED"), Removed([7], "CPU_PINNED"), Removed([8], "DISK")]


class Tiered(Followed):
    """A followed cache with a host tier of a few pages and a storage, which the test plays."""

    def __init__(self):
        self.listeners = []
        super().__init__(num_pages=16)

    def make_publisher(self) -> KVEventPublisher:
        publisher = start_publisher(config(kv_events_port=self.port), self.manager.prefix_cache, self)
        (self.tier,) = self.listeners
        return publisher

    def keys(self, prompt) -> list[bytes]:
        return page_keys(namespace_key(SHARED), np.array(prompt, np.int32), PAGE)


@pytest.fixture
def tiered():
    made = Tiered()
    yield made
    made.close()


def by_medium(events) -> dict[str, dict[int, tuple[int, ...]]]:
    copies = {"GPU": Copy(), "CPU_PINNED": Copy(), "DISK": Copy()}
    for event in events:
        for medium, copy in copies.items():
            if isinstance(event, Cleared) or event.medium == medium:
                copy.apply([event])
    return {medium: copy.pages for medium, copy in copies.items()}


def test_pages_of_host_memory_and_storage_are_published_with_their_tokens(tiered):
    prompt, other = list(range(12)), list(range(50, 58))
    hashes, events = page_hashes(prompt, PAGE), []
    content = {value: tuple(prompt[i * PAGE:(i + 1) * PAGE]) for i, value in enumerate(hashes)}
    tiered.compute(prompt)
    tiered.tier.stored(tiered.keys(prompt))
    tiered.tier.stored(tiered.keys(other))  # of a prefetch, which no prompt has brought to the device yet
    tiered.tier.written(tiered.keys(prompt)[:2])
    events += tiered.publisher._listener.take()
    assert by_medium(events) == {"GPU": content, "CPU_PINNED": content,
                                 "DISK": {value: content[value] for value in hashes[:2]}}
    assert len(events) == 3 and events[1].hashes == hashes and events[1].parent is None
    tiered.manager.allocator.free(tiered.manager.prefix_cache.evict(3))
    tiered.compute(other)
    tiered.tier.dropped(tiered.keys(prompt)[1:])
    events += tiered.publisher._listener.take()
    found = by_medium(events)
    assert set(found["GPU"]) == set(page_hashes(other, PAGE))
    assert set(found["CPU_PINNED"]) == {hashes[0], *page_hashes(other, PAGE)} and set(found["DISK"]) == set(hashes[:2])
    assert by_medium(tiered.publisher._listener.snapshot()) == found
    tiered.tier.cleared()
    tiered.manager.flush()
    events += tiered.publisher._listener.take()
    assert {medium: len(pages) for medium, pages in by_medium(events).items()} == {"GPU": 0, "CPU_PINNED": 0, "DISK": 2}
    tiered.tier.storage_cleared()
    (cleared, removed) = tiered.publisher._listener.take()
    assert isinstance(cleared, Cleared) and set(removed.hashes) == set(hashes[:2]) and removed.medium == "DISK"


def test_equal_pages_before_different_tokens_are_one_page_of_host_memory():
    recorder = TierEventRecorder(PAGE, 100)
    recorder.learn([b"a", b"b"], [7, 7], None, list(range(8)))
    recorder.stored([b"a", b"b", b"unknown"])
    recorder.dropped([b"a", b"unknown"])
    assert recorder.take() == [Stored([7], None, (0, 1, 2, 3), PAGE, "CPU_PINNED")] and recorder.take() == []
    recorder.dropped([b"b"])
    assert recorder.take() == [Removed([7], "CPU_PINNED")] and len(recorder) == 0


def test_a_recorder_remembers_no_more_pages_than_it_may():
    recorder = TierEventRecorder(PAGE, 10)
    keys = [bytes([number]) for number in range(40)]
    recorder.learn(keys, range(40), None, list(range(160)))
    recorder.stored(keys)
    assert [event.hashes for event in recorder.take()] == [[*range(30, 40)]]
    recorder.written(keys[30:])
    recorder.learn([b"new"], [99], None, [1, 2, 3, 4])
    recorder.written([b"new"])
    assert {event.hashes[0] for event in recorder.snapshot() if event.medium == "DISK"} == {*range(31, 40), 99}
