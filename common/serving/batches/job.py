"""One batch: every line goes through the route that serves its endpoint, beside other requests and behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import cast

import msgspec
from aiohttp import web

from ...api.errors import InvalidRequest, ServingError, TooLarge
from ...api.unreadable import UNREADABLE
from ..context import ServingContext
from ..files.schema import FileObject
from ..protocol.responses import encode
from ..storage.batch_store import Claimed
from ..storage.storage import Storage
from .schema import (
    MAX_ERRORS,
    MAX_LINES,
    BatchError,
    InputLine,
    LineError,
    LineResponse,
    OutputLine,
    Status,
    decode_line,
)

log = logging.getLogger("baton.batches")

Route = Callable[[ServingContext, web.Request], Awaitable[web.StreamResponse]]

_RETRY_SECONDS = 0.5
_READ_LINES = 256
_LATER = frozenset((429, 503))  # the server is full, or it ends: the line is not at fault
_GIVEN_UP = {
    "expired": LineError("batch_expired", "The batch expired before this request was answered."),
    "cancelled": LineError("batch_cancelled", "The batch was cancelled before this request was answered."),
}


class BatchSlots:
    """How many lines may run: ``most``, less one for every other request that is open, and always one.

    So batches use what others leave, and are slowed down by them without ever standing still.
    """

    def __init__(self, front: ServingContext, most: int):
        self._front = front
        self._most = most
        self._taken = 0
        self._left = asyncio.Event()

    async def take(self) -> None:
        """Wait for a place, and until the server takes requests."""
        while not self._front.is_ready or self._taken >= max(1, self._most - self._num_others):
            self._left.clear()
            with contextlib.suppress(asyncio.TimeoutError):  # the end of another request is not told
                await asyncio.wait_for(self._left.wait(), 0.05)
        self._taken += 1

    @property
    def _num_others(self) -> int:
        return max(0, self._front.client.num_open - self._taken)

    def leave(self) -> None:
        self._taken -= 1
        self._left.set()


class _Line:
    """What routes look at of an HTTP request, where a line of a file stands for one."""

    def __init__(self, body: bytes):
        self.headers: Mapping[str, str] = {}
        self._body = body

    async def read(self) -> bytes:
        return self._body


class _Peek(msgspec.Struct):
    stream: object = None


_peek = msgspec.json.Decoder(_Peek)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BatchJob:
    """Takes one claimed batch to its end. Cancelling the job leaves the batch as it is, to be claimed again."""

    def __init__(self, front: ServingContext, storage: Storage, claimed: Claimed, routes: Mapping[str, Route],
                 places: BatchSlots):
        self._front = front
        self._storage = storage
        self._batches = storage.batches
        self._batch = claimed.batch
        self._outcome = claimed.outcome
        self._keep_seconds = claimed.keep_seconds
        self._done = claimed.done
        self._route = routes[claimed.batch.endpoint]
        self._places = places
        self._path = storage.files.path(claimed.batch.input_file_id)

    async def run(self) -> None:
        """Raises LeaseLost where it is not this server's any more, or was cancelled by a client."""
        batch = self._batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status in ("validating", "in_progress"):
            self._outcome = "completed" if await self._answer_in_time() else "expired"
            if self._outcome == "expired":
                await self._give_up("expired")
            await self._batches.finalize(batch.id, self._outcome)
        elif batch.status == "cancelling":
            self._outcome = "cancelled"
            if batch.in_progress_at is not None:  # else its lines were not examined
                await self._give_up("cancelled")
        assert self._outcome is not None
        output, errors = await self._write(True), await self._write(False)
        await self._batches.end(batch.id, self._outcome, output, errors)
        log.info("%s: %s", batch.id, self._outcome)

    # ------------------------------------------------------------------ the input file

    async def _validate(self) -> bool:
        total, errors = await asyncio.to_thread(_examine, self._path, self._batch.endpoint)
        if errors:
            await self._batches.refuse(self._batch.id, errors)
        else:
            await self._batches.begin(self._batch.id, total)
        return not errors

    async def _unanswered(self) -> AsyncIterator[tuple[int, InputLine]]:
        """Lines without an answer, with their numbers; read off the event loop, as they are needed."""
        with self._path.open("rb") as file:
            lines = _numbered(file)
            while chunk := await asyncio.to_thread(lambda: list(islice(lines, _READ_LINES))):
                for number, text in chunk:
                    if number not in self._done:
                        line = decode_line(text, number, self._batch.endpoint)
                        assert isinstance(line, InputLine), "the file was examined before"
                        yield number, line

    # ------------------------------------------------------------------ answers

    async def _answer_in_time(self) -> bool:
        """Answer all lines; False where the batch expires before that."""
        answering = asyncio.create_task(self._answer_all())
        try:
            await asyncio.wait({answering}, timeout=max(0.0, self._batch.expires_at - self._storage.now()))
            if answering.done():
                answering.result()
            return answering.done()
        finally:
            await _end(answering)

    async def _answer_all(self) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            async for number, line in self._unanswered():
                await self._places.take()
                task = asyncio.create_task(self._answer(number, line))
                task.add_done_callback(lambda _: self._places.leave())
                running.add(task)
                for ended in [task for task in running if task.done()]:
                    running.discard(ended)
                    ended.result()
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    ended.result()
        finally:
            await _end(*running)

    async def _answer(self, number: int, line: InputLine) -> None:
        status, body = await self._ask(line)
        while status in _LATER:
            await asyncio.sleep(_RETRY_SECONDS)
            status, body = await self._ask(line)
        response = LineResponse(status, uuid.uuid4().hex, msgspec.Raw(body))
        await self._record(number, line, response, None)

    async def _ask(self, line: InputLine) -> tuple[int, bytes]:
        try:
            body = bytes(line.body)
            limit = self._front.config.http.max_payload_size
            if len(body) > limit:
                raise TooLarge(f"The request body is larger than --max-payload-size ({limit} bytes).")
            if _streams(body):
                raise InvalidRequest("stream is not possible in a batch; leave it out.", param="stream")
            schedule = self._front.config.schedule
            if schedule.enable_priority_scheduling:
                body = _with_priority(body, schedule.lowest_priority)
            answer = await self._route(self._front, cast(web.Request, _Line(body)))
            assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
            return answer.status, answer.body
        except ServingError as error:
            return error.status, encode(error.to_openai())
        except Exception:
            log.exception("%s: line %r failed", self._batch.id, line.custom_id)
            return 500, encode(ServingError("The server failed to handle the request; its log says why.").to_openai())

    async def _give_up(self, outcome: Status) -> None:
        self._done = await self._batches.answered(self._batch.id)
        async for number, line in self._unanswered():
            await self._record(number, line, None, _GIVEN_UP[outcome])

    async def _record(self, number: int, line: InputLine, response: LineResponse | None,
                      error: LineError | None) -> None:
        ok = response is not None and response.status_code < 400
        text = encode(OutputLine(f"batch_req_{uuid.uuid4().hex}", line.custom_id, response, error)) + b"\n"
        await self._batches.record(self._batch.id, number, ok, text)

    async def _write(self, ok: bool) -> FileObject | None:
        """The output file (``ok``) or the error file, None where it would be empty."""
        files, batch = self._storage.files, self._batch
        file_id, size = await self._batches.write(batch.id, ok, files.write)
        if not size:
            files.discard(file_id)
            return None
        name = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        return files.entry(file_id, name, "batch_output", size, self._keep_seconds)


def _numbered(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    for number, text in enumerate(lines, 1):
        text = (text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text).strip()
        if text:
            yield number, text


def _examine(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """How many requests a file holds, and the first of what is wrong with it."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, text in _numbered(file):
            total += 1
            found = decode_line(text, number, endpoint)
            if isinstance(found, InputLine) and found.custom_id in seen:
                found = BatchError("duplicate_custom_id", f"custom_id {found.custom_id[:80]!r} is not unique.", number,
                                   "custom_id")
            if isinstance(found, InputLine):
                seen.add(found.custom_id)
            else:
                errors.append(found)
            if total > MAX_LINES or len(errors) >= MAX_ERRORS:
                break
    if not total:
        errors.append(BatchError("empty_file", "The input file holds no requests."))
    if total > MAX_LINES:
        errors.append(BatchError("too_many_lines", f"The input file holds more than {MAX_LINES} requests; split it."))
    return total, errors


def _streams(body: bytes) -> bool:
    try:
        return bool(_peek.decode(body).stream)
    except UNREADABLE:
        return False  # the route says what is wrong


def _with_priority(body: bytes, priority: int) -> bytes:
    """The body with this priority, whatever it names: a batch can wait."""
    try:
        fields = _fields.decode(body)
    except UNREADABLE:
        return body  # the route says what is wrong
    return encode(fields | {"priority": msgspec.Raw(str(priority).encode())})


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
