"""The protocol in a simulated world: late and lost messages, peers that stop, die and restart, writes that take long.

Both cores are the real ones. The world delivers, lands, cuts and advances time as a random schedule says, and
holds memory to account: every destination page belongs to one reservation or is free, and a write that lands in a page
of another owner is the bug that all of this exists to prevent.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.common.api.errors import Aborted, Conflict
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer import receiving, recv_state, send_state, sending
from baton.kvtransfer.messages import PrefillResult, RankInfo
from baton.kvtransfer.states import Phase
from baton.kvtransfer.timing import Timing

LAYOUT = KVLayout(groups=(1,), num_kv_heads=1, head_dim=1, page_size=1, dtype="float32")
TIMING = Timing(bootstrap_timeout=8.0, transfer_timeout=20.0, peer_timeout=3.0)
ADDRESS = ("prefill", 1)
NUM_PAGES = 8
ROOMS = 3
TICK = 0.1


@dataclass
class Wire:
    """One connection: what is on its way in each direction."""

    to_sender: deque = field(default_factory=deque)
    to_receiver: deque = field(default_factory=deque)


@dataclass
class Flight:
    """A posted write. ``owner`` is the stamp of the reservation that it was made for. ``lost``: it cannot land."""

    write: send_state.Write
    owner: int
    session: bytes
    lost: bool = False


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.instances = itertools.count()
        self.wires: dict[bytes, Wire] = {}
        self.flights: list[Flight] = []
        self.owner: dict[int, int | None] = dict.fromkeys(range(NUM_PAGES))  # page -> stamp
        self.content: dict[int, int | None] = dict.fromkeys(range(NUM_PAGES))  # page -> stamp that wrote it
        self.ended: set[int] = set()
        self.completed = 0
        self.stopped = False
        self.inbox: list[tuple[bytes, object]] = []  # at the sender's host, of connections that are gone
        self.pushed: set[int] = set()  # rooms whose pages were handed to the sender
        self.unverified: deque[recv_state.Verify] = deque()
        self.receiver = receiving.ReceiverCore(self.identity(), TIMING, NUM_PAGES, checksum="sampled")
        self.sender = sending.SenderCore(self.identity(), TIMING)

    def identity(self) -> RankInfo:
        return RankInfo(f"instance-{next(self.instances)}", "endpoint", 0, 1, LAYOUT, "simulated")

    # -- what a schedule may do -----------------------------------------------------------------------------------

    def expect(self, n: int) -> None:
        room = n % ROOMS
        if not self.stopped and room not in self.sender.rooms:
            digest = 1 if n % 32 == 31 else 0
            self.sender.expect(room, digest, 1 + room, self.now)

    def reserve(self, n: int) -> None:
        room, num_tokens = n % ROOMS, 1 + n % ROOMS
        free = [page for page, owner in self.owner.items() if owner is None]
        first_page = n // 9 % (num_tokens + 1)
        if len(free) < num_tokens - first_page:
            return
        page_ids = free[:num_tokens - first_page]
        try:
            pages = np.array(page_ids, dtype=np.int64)
            self.receiver.reserve(room, ADDRESS, 0, num_tokens, first_page, pages, self.now)
        except Conflict:
            assert room in self.receiver.rooms
            return
        stamp = self.receiver.rooms[room].reserve.stamp
        for page in page_ids:
            self.owner[page], self.content[page] = stamp, None

    def push(self, n: int) -> None:
        room = n % ROOMS
        half = self.sender.rooms.get(room)
        if not self.stopped and half is not None and half.phase not in (Phase.RESERVING, Phase.DONE) \
                and half.result is None and room not in self.pushed:
            self.pushed.add(room)
            self.sender.push(room, 0, 0, np.arange(half.num_prompt_tokens), None)

    def finish(self, n: int) -> None:
        room = n % ROOMS
        half = self.sender.rooms.get(room)
        if not self.stopped and half is not None and room in self.pushed and half.phase is not Phase.DONE \
                and half.result is None:
            self.sender.finish(room, PrefillResult(room, 0), self.now)

    def abort_sender(self, n: int) -> None:
        if not self.stopped:
            self.sender.abort(n % ROOMS, Aborted("by prefill"), self.now)

    def abort_receiver(self, n: int) -> None:
        self.receiver.abort(n % ROOMS, Aborted("by decode"), self.now)

    def deliver(self, n: int) -> None:
        """One message of one wire in one direction; a stopped sender receives nothing."""
        wires = list(self.wires.items())
        if not wires:
            return
        link, wire = wires[n // 2 % len(wires)]
        if n % 2 and wire.to_receiver:
            self.receiver.receive(link, wire.to_receiver.popleft(), self.now)
        elif wire.to_sender and not self.stopped:
            self.sender.receive(link, wire.to_sender.popleft(), self.now)

    def read_inbox(self, n: int) -> None:
        if self.inbox and not self.stopped:
            self.sender.receive(*self.inbox.pop(0), self.now)

    def outage(self, n: int) -> None:
        """The prefill process stops, is cut off while its peer gives it up, and resumes where it was."""
        if n % 4 == 0 and not self.stopped:
            self.stop(0)
            if n % 8:
                self.advance(1)
            self.cut(0)
            self.settle()
            self.advance(n // 8)
            self.reserve(n)
            self.settle()
            self.stop(0)
            self.post(0)

    def post(self, n: int) -> None:
        if self.stopped:
            return
        for write in self.sender.take_writes(self.now, lambda event: True):
            destination = write.destination
            self.flights.append(Flight(write, destination.stamp, destination.session.id))

    def land(self, n: int) -> None:
        if self.flights and not self.stopped:
            flight = self.flights.pop(n % len(self.flights))
            if not flight.lost:
                self.touch(flight)
            self.sender.written(flight.write, not flight.lost, self.now)

    def fail_write(self, n: int) -> None:
        if self.flights and not self.stopped and n % 4 == 0:
            self.sender.written(self.flights.pop(0).write, False, self.now)

    def advance(self, n: int) -> None:
        for _ in range((1, 3, 10, 40)[n % 4]):
            self.now += TICK
            if not self.stopped:
                self.sender.tick(self.now)
            self.receiver.tick(self.now)
            self.settle()

    def cut(self, n: int) -> None:
        """A connection breaks: what was on it is lost, and the receiver is told (the sender hears only silence)."""
        if n % 3 == 0 and self.wires:
            link = list(self.wires)[n // 3 % len(self.wires)]
            # Some of what we sent has reached the sender's host, where it can be read as late as the sender likes.
            self.inbox += [(link, message) for message in list(self.wires[link].to_sender)[:n % 4]]
            self.drop_wire(link)
            self.receiver.disconnected(link, self.now)
            self.lose_stopped_writes()

    def kill(self, n: int) -> None:
        """The prefill process dies and another starts at the same address. Posted writes land at once, or never."""
        if n % 4:
            return
        for number, flight in enumerate(self.flights):
            if n >> number & 4:
                self.touch(flight)
        self.flights.clear()
        self.stopped = False
        self.sender = sending.SenderCore(self.identity(), TIMING)
        self.inbox.clear()
        self.pushed.clear()
        for link in list(self.wires):
            self.drop_wire(link)
            self.receiver.disconnected(link, self.now)

    def stop(self, n: int) -> None:
        """SIGSTOP or SIGCONT of the prefill process; its connections stand meanwhile."""
        if self.stopped:
            self.stopped = False
            self.sender.tick(self.now, stalled=3.0)
        elif n % 4 == 0:
            self.stopped = True
            self.lose_stopped_writes()

    def verify(self, n: int) -> None:
        """A comparison of checksums ends, which takes its time; now and then they differ."""
        if self.unverified:
            self.receiver.verified(self.unverified.popleft().half, n % 16 != 0, self.now)

    def flow(self, n: int) -> None:
        """Everything on its way arrives, and what may be written is."""
        for _ in range(4):
            for link in list(self.wires):
                while link in self.wires and self.wires[link].to_sender and not self.stopped:
                    self.sender.receive(link, self.wires[link].to_sender.popleft(), self.now)
                    self.settle()
                while link in self.wires and self.wires[link].to_receiver:
                    self.receiver.receive(link, self.wires[link].to_receiver.popleft(), self.now)
                    self.settle()
            self.post(0)
            self.verify(1)
            if n % 2:
                self.land(n)
                self.settle()

    # -- how the world works --------------------------------------------------------------------------------------

    def lose_stopped_writes(self) -> None:
        """What closes the connection of a process that is stopped also breaks its data path (receiving.py says so)."""
        for flight in self.flights if self.stopped else ():
            flight.lost |= flight.session not in self.wires

    def drop_wire(self, link: bytes) -> None:
        del self.wires[link]

    def touch(self, flight: Flight) -> None:
        for page in flight.write.dst_page_ids.tolist():
            assert self.owner[page] == flight.owner, (
                f"a late write for reservation {flight.owner} landed in page {page} of {self.owner[page]}")
            self.content[page] = flight.owner

    def settle(self) -> None:
        """Carry out effects and let the schedulers forget what has ended."""
        while self.receiver.effects or (self.sender.effects and not self.stopped):
            if self.receiver.effects:
                self.receiver_effect(self.receiver.effects.popleft())
            if self.sender.effects and not self.stopped:
                self.sender_effect(self.sender.effects.popleft())
        for room, half in list(self.receiver.rooms.items()):
            self.check_receiver(room, half)
        if not self.stopped:
            for room, half in list(self.sender.rooms.items()):
                self.check_sender(room, half)

    def receiver_effect(self, effect: recv_state.Effect) -> None:
        if isinstance(effect, recv_state.Lookup):
            self.receiver.found(effect.address, [self.sender.info], self.now)
        elif isinstance(effect, recv_state.Connect):
            self.wires[effect.link.id] = Wire()
        elif isinstance(effect, recv_state.Send):
            if effect.link in self.wires:
                self.wires[effect.link].to_sender.append(effect.message)
        elif isinstance(effect, recv_state.Verify):
            self.unverified.append(effect)
        elif effect.link in self.wires:
            self.drop_wire(effect.link)

    def sender_effect(self, effect: send_state.Effect) -> None:
        if isinstance(effect, send_state.Send):
            if effect.session in self.wires:
                self.wires[effect.session].to_receiver.append(effect.message)
        elif isinstance(effect, send_state.Admit):
            self.sender.admitted(effect.session, effect.session.id, self.now)
        else:
            for flight in [f for f in self.flights if f.session == effect.session.id]:
                self.flights.remove(flight)
                self.sender.written(flight.write, False, self.now)

    def check_receiver(self, room: int, half: recv_state.RecvRoom) -> None:
        stamp = half.reserve.stamp
        if not half.phase.terminal:
            return
        assert stamp not in self.ended, "a second end"
        self.ended.add(stamp)
        self.receiver.forget(room)
        for page, owner in self.owner.items():
            if owner == stamp:
                if half.phase is Phase.DONE:
                    assert self.content[page] == stamp, "DONE without the page's content"
                self.owner[page] = None
        if half.phase is Phase.DONE:
            assert half.result == PrefillResult(room, 0)
            self.completed += 1
        else:
            assert half.error is not None

    def check_sender(self, room: int, half: send_state.SendRoom) -> None:
        if half.phase.terminal:
            assert half.in_flight == 0, "source pages freed under a write"
            assert (half.error is None) is (half.phase is Phase.DONE)
            self.sender.forget(room)
            self.pushed.discard(room)

    def finale(self) -> None:
        """The world heals; everything must end."""
        if self.stopped:
            self.stop(0)
        for _ in range(400):
            self.settle()
            self.flow(1)
            self.advance(0)
        assert not self.sender.rooms and not self.receiver.rooms, "a room that never ends"
        assert all(owner is None for owner in self.owner.values()), "a page leaked"
        assert not self.sender.queue and not self.flights

    def run(self, schedule: list[tuple[str, int]]) -> None:
        for name, n in schedule:
            getattr(self, name)(n)
            self.settle()
        self.finale()


COMMON = ["expect", "reserve", "push", "finish", "verify", *["deliver"] * 4, *["post"] * 2, *["land"] * 2,
          *["flow"] * 2]
RARE = ["abort_sender", "abort_receiver", "fail_write", "advance", "advance", "cut", "kill", "stop", "outage", "outage",
        "read_inbox"]
STEP = st.tuples(st.sampled_from(COMMON * 6 + RARE), st.integers(0, 1023))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(STEP, min_size=1, max_size=120))
def test_no_schedule_writes_into_a_page_of_another(schedule):
    World().run(schedule)


def random_schedule(rng: np.random.Generator, length: int) -> list[tuple[str, int]]:
    names = COMMON * 6 + RARE
    return [(names[i], int(n)) for i, n in zip(rng.integers(0, len(names), length), rng.integers(0, 1024, length))]


def test_random_schedules_do_complete_transfers():
    """Hypothesis favours short schedules; long random ones reach DONE often enough to mean something."""
    completed = 0
    for seed in range(100):
        world = World()
        world.run(random_schedule(np.random.default_rng(seed), 400))
        completed += world.completed
    assert completed > 50
