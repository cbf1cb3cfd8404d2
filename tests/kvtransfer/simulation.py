"""The protocol in a simulated world: late and lost messages, peers that stop, die and restart, writes that take long.

The cores are the real ones, of several ranks on both sides. The world delivers, writes, cuts, kills and advances time
as a random schedule says, and holds memory to account: every destination page belongs to one request or is free, and a
write that arrives in a page of another owner is the bug that all of this exists to prevent. What a connection may do is
what ZMQ and TCP do: keep its order, and lose its end. Between connections, and between messages and writes, any order
is possible. Messages that come twice, which ZMQ does not do, are played as well.
"""

from __future__ import annotations

import itertools
from collections import deque
from random import Random

import numpy as np

from baton.common.api.errors import Aborted, TransferFailed
from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.checksum import Extent
from baton.kvtransfer.protocol.messages import PrefillResult, RankInfo
from baton.kvtransfer.protocol.states import Phase
from baton.kvtransfer.protocol.timing import Timing
from baton.kvtransfer.receiver import receiver_core, receiver_state
from baton.kvtransfer.sender import sender_core, sender_state
from baton.tests.kvtransfer.simulated import NUM_FLAGS, Flight, Group, Job, Memory, PendingFlag, Request, Wire

TIMING = Timing(bootstrap_timeout=8.0, transfer_timeout=20.0, peer_timeout=3.0)
ADDRESS = ("prefill", 1)
HEADS, NUM_PAGES, ROOMS, TICK = 2, 8, 3, 0.1
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))  # ranks of prefill and of decode


def layout(ranks: int) -> KVLayout:
    return KVLayout(groups=(1,), num_kv_heads=HEADS // ranks, head_dim=1, page_size=1, dtype="float32")


class World:
    def __init__(self, prefill_ranks: int = 1, decode_ranks: int = 1, quarantine_seconds: float = 0.0,
                 checksum: Extent = "sampled") -> None:
        """``quarantine_seconds``: how long the backend's writes may still arrive that it has given up. Completion flags
        report pages where ``checksum`` is off."""
        self.now, self.quarantine_seconds, self.checksum = 100.0, quarantine_seconds, checksum
        self.late: list[tuple[float, Flight]] = []  # given up, with the time until which each may land
        self.instances, self.serials = itertools.count(), itertools.count()
        self.wires: dict[bytes, Wire] = {}
        self.flights: list[Flight] = []
        self.inbox: list[tuple[int, bytes, object]] = []  # at a sender's host, of connections that are gone
        self.unverified: deque[tuple[receiver_core.ReceiverCore, receiver_state.Verify]] = deque()
        self.completed = self.failed = self.early_completions = 0
        self.serial_of: dict[tuple[str, int], int] = {}  # by a receiver's instance, and its stamp
        self.gone_on: set[int] = set()  # requests that decode has taken over, or that were aborted there
        self.ranks = prefill_ranks, decode_ranks
        self.sender_of: dict[bytes, int] = {}  # by session
        self.start_prefill()
        self.start_decode()

    def start_prefill(self) -> None:
        self.prefill = Group([sender_core.SenderCore(self.identity(rank, self.ranks[0]), TIMING)
                              for rank in range(self.ranks[0])])
        self.jobs: dict[int, Job] = {}
        self.awaiting_ack: dict[int, int] = {}  # room -> the request that its pages were for

    def start_decode(self) -> None:
        self.decode = Group([
            receiver_core.ReceiverCore(self.identity(rank, self.ranks[1]), TIMING, NUM_PAGES, checksum=self.checksum,
                                       quarantine_seconds=self.quarantine_seconds) for rank in range(self.ranks[1])])
        self.memory = Memory(NUM_PAGES, self.ranks[1])
        self.requests: dict[int, Request] = {}
        self.unverified.clear()

    def identity(self, rank: int, ranks: int) -> RankInfo:
        return RankInfo(f"instance-{next(self.instances)}", "endpoint", rank, ranks, layout(ranks), "simulated")

    # -- what the schedulers do -----------------------------------------------------------------------------------

    def expect(self, n: int) -> None:
        room = n % ROOMS
        if room not in self.jobs and not self.prefill.stopped:
            if room in self.awaiting_ack:
                self.stop_awaiting_ack(room)
            self.jobs[room] = Job(room, 1 + room)
            self.prefill.call("expect", room, 1 if n % 32 == 31 else 0, 1 + room, self.now)

    def reserve(self, n: int) -> None:
        room, num_tokens = n % ROOMS, 1 + n % ROOMS
        free = self.memory.free
        first_page = n // 9 % (num_tokens + 1)
        if room in self.requests or len(free) < num_tokens - first_page:
            return
        request = self.requests[room] = Request(next(self.serials), room, free[:num_tokens - first_page])
        self.memory.give(request)
        pages, now = np.array(request.page_ids, dtype=np.int64), self.now

        def on_rank(core: receiver_core.ReceiverCore) -> None:
            core.reserve(room, ADDRESS, 0, num_tokens, first_page, pages, now)
            self.serial_of[core.info.instance, core.transfers[room].reserve.stamp] = request.serial

        for queue in self.decode.todo:
            queue.append(on_rank)

    def decline(self, n: int) -> None:
        if n % ROOMS not in self.requests:
            self.decode.call("connections.decline", n % ROOMS, ADDRESS, Aborted("by decode, early"), self.now)

    def push(self, n: int) -> None:
        """A chunk of one page or more, once the group agrees that both sides have joined."""
        job = self.jobs.get(n % ROOMS)
        if job is None or job.answered or job.pushed == job.num_tokens or not self.prefill.run_all():
            return
        if min(core.transfers[job.room].phase for core in self.prefill.cores) >= Phase.RESERVED:
            stop = job.num_tokens if n % 2 else job.pushed + 1
            self.prefill.call("push", job.room, 0, job.pushed, np.arange(job.pushed, stop), None)
            job.pushed = stop
        self.prefill.run(n % self.ranks[0])

    def finish(self, n: int) -> None:
        job = self.jobs.get(n % ROOMS)
        if job is not None and not job.finished and not job.answered and job.pushed == job.num_tokens:
            job.finished = True
            self.prefill.call("finish", job.room, PrefillResult(job.room, 0), self.now)

    def meet(self, n: int) -> None:
        for transfer in (self.expect, self.reserve) if n % 2 else (self.reserve, self.expect):
            transfer(n)

    def work(self, n: int = 0) -> None:
        """Prefill's scheduler does all that it can."""
        for room in list(self.jobs):
            self.push(room)
            self.finish(room)

    def abort_prefill(self, n: int) -> None:
        job = self.jobs.get(n % ROOMS)
        if job is not None and not job.answered:
            self.end_job(job, Aborted("by prefill"))

    def abort_decode(self, n: int) -> None:
        request = self.requests.get(n % ROOMS)
        if request is not None and not request.answered:
            self.end_request(request, Aborted("by decode"))
            self.gone_on.add(request.serial)

    def run_rank(self, n: int) -> None:
        group = (self.prefill, self.decode)[n % 2]
        group.run(n // 2 % len(group.cores))

    def poll_prefill(self, n: int = 0) -> None:
        if not self.prefill.run_all():
            return
        for job in list(self.jobs.values()):
            transfers = [core.transfers[job.room] for core in self.prefill.cores]
            if min(transfer.phase for transfer in transfers) <= Phase.ABORTING and not job.answered:
                self.end_job(job, TransferFailed("as decode or another rank has it"))
                self.prefill.run_all()
            if all(transfer.phase.terminal for transfer in transfers):
                self.close_job(job, transfers)
        cores = self.prefill.cores
        for room in [room for room in self.awaiting_ack if all(core.is_acknowledged(room) for core in cores)]:
            assert self.awaiting_ack[room] in self.gone_on, "prefill dropped a prompt that decode has not acknowledged"
            self.stop_awaiting_ack(room)

    def poll_decode(self, n: int = 0) -> None:
        self.decode.run_all()
        for core, flags in zip(self.decode.cores, self.memory.completion_flags):
            for transfer in core.transfers.values():
                if transfer.early_results and transfer.room in self.requests:
                    core.check_flags(transfer, flags, self.now)
                    self.early_completions += transfer.phase is Phase.DONE
        for request in list(self.requests.values()):
            transfers = [core.transfers[request.room] for core in self.decode.cores]
            if min(transfer.phase for transfer in transfers) <= Phase.ABORTING and not request.answered:
                assert any(transfer.error is not None for transfer in transfers)
                self.end_request(request, TransferFailed("as prefill or another rank has it"))
                self.decode.run_all()
            if all(transfer.phase.terminal for transfer in transfers):
                self.close_request(request, transfers)

    def end_job(self, job: Job, error: Exception) -> None:
        assert not job.answered, "a second end at prefill"
        job.answered = True
        self.prefill.call("abort", job.room, error, self.now)

    def close_job(self, job: Job, transfers: list) -> None:
        assert not any(transfer.in_flight for transfer in transfers), "source pages freed under a write"
        assert all((transfer.error is None) is (transfer.phase is Phase.DONE) for transfer in transfers)
        del self.jobs[job.room]
        if job.answered:
            self.prefill.call("forget", job.room)
        else:
            self.awaiting_ack[job.room] = self.serial(transfers[0].destinations[0])
            self.prefill.call("await_ack", job.room)
        self.prefill.run_all()

    def stop_awaiting_ack(self, room: int) -> None:
        del self.awaiting_ack[room]
        self.prefill.call("stop_awaiting_ack", room)
        self.prefill.run_all()

    def end_request(self, request: Request, error: Exception) -> None:
        assert not request.answered, "a second end at decode"
        request.answered = True
        self.failed += 1
        self.decode.call("abort", request.room, error, self.now)

    def close_request(self, request: Request, transfers: list) -> None:
        if not request.answered:
            self.check_content(request, transfers)
            request.answered = True
            self.completed += 1
            self.gone_on.add(request.serial)
            self.decode.call("acknowledge", request.room)
        del self.requests[request.room]
        self.decode.call("forget", request.room)
        self.decode.run_all()
        self.memory.take_back(request)

    def check_content(self, request: Request, transfers: list) -> None:
        for rank, transfer in enumerate(transfers):
            assert transfer.result == PrefillResult(request.room, 0)
            carriers = self.carriers(rank, {self.sender_of[session] for session in transfer.writers.instances})
            for page in request.page_ids:
                assert self.memory.written[rank, page] == carriers, "DONE without the page's content"

    def carriers(self, rank: int, writers: set[int]) -> set[int]:
        """Returns those of the prefill ranks that send heads to a decode rank."""
        prefill, decode = self.ranks
        if prefill < decode:
            return writers & {rank * prefill // decode}
        return {writer for writer in writers if writer * decode // prefill == rank}

    def serial(self, destination: sender_state.Destination) -> int:
        return self.serial_of[destination.session.info.instance, destination.stamp]

    # -- what the network and the machines do ---------------------------------------------------------------------

    def deliver(self, n: int) -> None:
        """One message of one wire in one direction; a stopped sender receives nothing."""
        wires = list(self.wires.items())
        if not wires:
            return
        session, wire = wires[n // 2 % len(wires)]
        if n % 2 and wire.to_receiver:
            self.decode.cores[wire.receiver].receive(session, wire.to_receiver.popleft(), self.now)
        elif wire.to_sender and wire.sender not in self.prefill.stopped:
            self.prefill.cores[wire.sender].receive(session, wire.to_sender.popleft(), self.now)

    def repeat(self, n: int) -> None:
        """A message comes once more, however late. ZMQ does not do that; nothing may depend on it."""
        said = [past for wire in self.wires.values() for past in wire.past]
        if said:
            queue, message = said[n % len(said)]
            queue.append(message)

    def read_inbox(self, n: int) -> None:
        for place, (rank, session, message) in enumerate(self.inbox):
            if rank not in self.prefill.stopped:
                del self.inbox[place]
                self.prefill.cores[rank].receive(session, message, self.now)
                return

    def post(self, n: int = 0) -> None:
        for rank, core in enumerate(self.prefill.cores):
            if rank in self.prefill.stopped:
                continue
            for write in core.queue.take(self.now, lambda event: True):
                info = write.session.info
                alive = self.decode.cores[info.rank].info.instance == info.instance
                self.flights.append(Flight(write, self.serial(write.destination), rank, info.rank, lost=not alive))
            self.send_early_result(rank, core)

    def send_early_result(self, rank: int, core: sender_core.SenderCore) -> None:
        """Sends early results as the sender's I/O thread does: the flag follows all writes in flight to the peer."""
        mine = [flight for flight in self.flights if flight.sender == rank]
        for transfer in {id(flight.write.transfer): flight.write.transfer for flight in mine}.values():
            for destination in core.early_completion_targets(transfer):
                value, info = next(self.serials) + 1, destination.session.info
                after = [flight for flight in mine if flight.session == destination.session.id]
                if after and self.decode.cores[info.rank].info.instance == info.instance:
                    self.memory.pending_flags.append(PendingFlag(info.rank, value, after))
                core.send_early_result(destination, transfer.result, value % NUM_FLAGS, value)

    def land(self, n: int) -> None:
        moving = [flight for flight in self.flights if flight.sender not in self.prefill.stopped]
        if moving:
            flight = moving[n % len(moving)]
            self.flights.remove(flight)
            if not flight.lost:
                self.memory.touch(flight)
            self.prefill.cores[flight.sender].written(flight.write, not flight.lost, self.now)

    def fail_write(self, n: int) -> None:
        moving = [flight for flight in self.flights if flight.sender not in self.prefill.stopped]
        if moving:
            flight = moving[n % len(moving)]
            self.flights.remove(flight)
            self.late.append((self.now + self.quarantine_seconds, flight))
            self.prefill.cores[flight.sender].written(flight.write, False, self.now)

    def arrive_late(self, n: int) -> None:
        """Completes writes that were given up, at the last moment or before."""
        self.late = [(until, flight) for until, flight in self.late if self.now < until and not flight.lost]
        if self.late:
            self.memory.touch(self.late.pop(n % len(self.late))[1])

    def advance(self, n: int) -> None:
        for _ in range((1, 3, 10, 40)[n % 4]):
            self.now += TICK
            for rank, core in enumerate(self.prefill.cores):
                if rank not in self.prefill.stopped:
                    core.tick(self.now)
            for core in self.decode.cores:
                core.tick(self.now)
            self.settle()

    def cut(self, n: int) -> None:
        """A connection breaks. Some of what was on it has arrived: at the sender's host, where it is read as late as
        the sender likes, and at the receiver, which reads it first. The sender hears only silence."""
        if self.wires:
            session = list(self.wires)[n % len(self.wires)]
            wire = self.wires[session]
            self.inbox += [(wire.sender, session, message) for message in list(wire.to_sender)[:n // 8 % 4]]
            for message in list(wire.to_receiver)[:n // 32 % 4]:
                self.decode.cores[wire.receiver].receive(session, message, self.now)
            self.wires.pop(session, None)
            self.decode.cores[wire.receiver].disconnected(session, self.now)
            self.lose_stopped_writes()

    def kill_prefill(self, n: int) -> None:
        """All ranks die and others start at the same address. Posted writes land at once, or never."""
        for number, flight in enumerate(self.flights):
            if n >> number % 8 & 1 and not flight.lost:
                self.memory.touch(flight)
        self.flights.clear()
        self.late.clear()
        self.inbox.clear()
        self.start_prefill()
        for session, wire in list(self.wires.items()):
            del self.wires[session]
            self.decode.cores[wire.receiver].disconnected(session, self.now)

    def kill_decode(self, n: int) -> None:
        """Its memory is gone with it; a successor starts with memory of its own. Prefill hears nothing."""
        for flight in [*self.flights, *(flight for _, flight in self.late)]:
            flight.lost = True
        for session, wire in list(self.wires.items()):
            self.inbox += [(wire.sender, session, message) for message in list(wire.to_sender)[:n // 8 % 4]]
            del self.wires[session]
        self.start_decode()

    def stop(self, n: int) -> None:
        """SIGSTOP of one prefill rank, or SIGCONT; its connections stand meanwhile."""
        rank = n % self.ranks[0]
        since = self.prefill.stopped.pop(rank, None)
        if since is not None:
            self.prefill.cores[rank].tick(self.now, stalled=self.now - since)
        else:
            self.prefill.stopped[rank] = self.now
            self.lose_stopped_writes()

    def outage(self, n: int) -> None:
        """A prefill rank stops, is cut off while its peer gives it up, and resumes where it was."""
        rank = n % self.ranks[0]
        if rank in self.prefill.stopped:
            return
        self.stop(rank)
        if n % 8:
            self.advance(1)
        for _ in range(2):
            self.cut(n)
            self.settle()
        self.advance(n // 8)
        self.poll_decode()
        self.reserve(n)
        self.settle()
        self.stop(rank)
        self.post()

    def verify(self, n: int) -> None:
        """A comparison of checksums ends, which takes its time; now and then they differ."""
        if self.unverified:
            core, effect = self.unverified.popleft()
            core.verified(effect.transfer, n % 16 != 0, self.now)

    def flow(self, n: int) -> None:
        """Delivers all messages and completes all writes."""
        for _ in range(3):
            for session in list(self.wires):
                while (wire := self.wires.get(session)) and wire.to_sender and wire.sender not in self.prefill.stopped:
                    self.prefill.cores[wire.sender].receive(session, wire.to_sender.popleft(), self.now)
                    self.settle()
                while (wire := self.wires.get(session)) and wire.to_receiver:
                    self.decode.cores[wire.receiver].receive(session, wire.to_receiver.popleft(), self.now)
                    self.settle()
            self.post()
            self.verify(1)
            if n % 2:
                self.land(n)
            self.settle()
        self.poll_prefill()
        self.poll_decode()

    # -- how the world works --------------------------------------------------------------------------------------

    def lose_stopped_writes(self) -> None:
        """What closes the connection of a process that is stopped also breaks its data path (writers.py says so)."""
        for flight in self.flights:
            flight.lost |= flight.sender in self.prefill.stopped and flight.session not in self.wires

    def settle(self) -> None:
        """The I/O threads carry out what the cores ask for."""
        again = True
        while again:
            again = False
            for core in self.decode.cores:
                while core.effects:
                    self.receiver_effect(core, core.effects.popleft())
                    again = True
            for rank, core in enumerate(self.prefill.cores):
                while core.effects and rank not in self.prefill.stopped:
                    self.sender_effect(core, core.effects.popleft())
                    again = True

    def receiver_effect(self, core: receiver_core.ReceiverCore, effect: receiver_state.Effect) -> None:
        if isinstance(effect, receiver_state.Lookup):
            core.connect_to_ranks(effect.address, [sender.info for sender in self.prefill.cores], self.now)
        elif isinstance(effect, receiver_state.Connect):
            instances = [sender.info.instance for sender in self.prefill.cores]
            sender = instances.index(effect.session.instance)
            self.wires[effect.session.id] = Wire(sender, core.info.rank)
            self.sender_of[effect.session.id] = sender
        elif isinstance(effect, receiver_state.Send):
            if effect.session in self.wires:
                wire = self.wires[effect.session]
                wire.to_sender.append(effect.message)
                wire.past.append((wire.to_sender, effect.message))
        elif isinstance(effect, receiver_state.Verify):
            self.unverified.append((core, effect))
        else:
            self.wires.pop(effect.session, None)

    def sender_effect(self, core: sender_core.SenderCore, effect: sender_state.Effect) -> None:
        if isinstance(effect, sender_state.Send):
            if effect.session in self.wires:
                wire = self.wires[effect.session]
                wire.to_receiver.append(effect.message)
                wire.past.append((wire.to_receiver, effect.message))
        elif isinstance(effect, sender_state.Admit):
            core.sessions.admitted(effect.session, effect.session.id, self.now)
        else:
            for flight in [f for f in self.flights if f.session == effect.session.id]:
                self.flights.remove(flight)
                self.late.append((self.now + self.quarantine_seconds, flight))
                core.written(flight.write, False, self.now)

    def finale(self) -> None:
        """The world heals; everything must end."""
        for rank in list(self.prefill.stopped):
            self.stop(rank)
        for turn in range(400):
            self.settle()
            self.work()
            self.flow(1)
            self.advance(0 if turn < 40 else 2)
            if turn > 2 and not (self.jobs or self.requests or self.flights or self.unverified):
                break
        self.post()
        assert not self.jobs and not self.requests, "a room that never ends"
        assert not any(core.transfers for core in (*self.prefill.cores, *self.decode.cores))
        assert len(self.memory.free) == NUM_PAGES, "a page leaked"
        assert not self.flights and not any(core.queue for core in self.prefill.cores)

    def run(self, schedule: list[tuple[str, int]]) -> World:
        for name, n in schedule:
            getattr(self, name)(n)
            self.settle()
        self.finale()
        return self


COMMON = ["meet", "meet", "expect", "reserve", "push", "push", "finish", "work", "verify", "run_rank",
          *["deliver"] * 4, *["post"] * 2, *["land"] * 2, *["flow"] * 3, "poll_prefill", "poll_decode"]
RARE = ["abort_prefill", "abort_decode", "decline", "fail_write", "advance", "advance", "advance", "cut",
        "kill_prefill", "kill_decode", "stop", "outage", "outage", "read_inbox", "arrive_late", "arrive_late",
        "repeat", "repeat"]
_NAMES = COMMON * 6 + RARE


def run_seed(seed: int) -> World:
    """One schedule, which is all in its seed. An AssertionError names it, whatever went wrong."""
    rng = Random(seed)
    world = World(*SHAPES[seed % len(SHAPES)], quarantine_seconds=(0.0, 10.0)[seed // len(SHAPES) % 2],
                  checksum=("sampled", "off")[seed // len(SHAPES) // 2 % 2])
    schedule = [(rng.choice(_NAMES), rng.randrange(1024)) for _ in range(rng.randrange(10, 120))]
    try:
        return world.run(schedule)
    except Exception as error:
        raise AssertionError(f"schedule {seed}: {error}") from error
