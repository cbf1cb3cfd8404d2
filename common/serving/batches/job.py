"""One batch: every line goes through the handler of its endpoint, with a lower share of the engine than requests."""

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
from ..context.serving_context import ServingContext
from ..protocol.encoding import encode
from ..storage.batch_schema import (
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
from ..storage.batch_store import Claimed
from ..storage.file_schema import FileObject
from ..storage.storage import Storage

log = logging.getLogger("baton.batches")

Route = Callable[[ServingContext, web.Request], Awaitable[web.StreamResponse]]

_RETRY_SECONDS = 0.5
_READ_LINES = 256
_RETRIED_STATUSES = frozenset((429, 503))  # the server is full, or stops: the line is not at fault
_UNANSWERED_ERRORS = {
    "expired": LineError("batch_expired", "The batch expired before this request was answered."),
    "cancelled": LineError("batch_cancelled", "The batch was cancelled before this request was answered."),
}


class BatchSlots:
    """Limits the lines that run at once: ``limit``, less one for every other open request, and always one.

    Batches use the capacity that requests leave; they are slowed down by them, and never stop.
    """

    def __init__(self, context: ServingContext, limit: int):
        self._context = context
        self._limit = limit
        self._num_running = 0
        self._released = asyncio.Event()

    async def acquire(self) -> None:
        """Waits for a slot, and until the server takes requests."""
        while not self._context.status.is_ready or self._num_running >= max(1, self._limit - self._num_others):
            self._released.clear()
            with contextlib.suppress(asyncio.TimeoutError):  # the end of other requests sets no event
                await asyncio.wait_for(self._released.wait(), 0.05)
        self._num_running += 1

    @property
    def _num_others(self) -> int:
        return max(0, self._context.client.num_open - self._num_running)

    def release(self) -> None:
        self._num_running -= 1
        self._released.set()


class _Line:
    """A line of an input file in the place of an HTTP request, with the members that handlers read."""

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
    """Runs one claimed batch to its end. Cancelling the job leaves the batch as it is, to be claimed again."""

    def __init__(self, context: ServingContext, storage: Storage, claimed: Claimed, routes: Mapping[str, Route],
                 slots: BatchSlots):
        self._context = context
        self._storage = storage
        self._batches = storage.batches
        self._batch = claimed.batch
        self._outcome = claimed.outcome
        self._keep_seconds = claimed.keep_seconds
        self._answered_lines = claimed.done
        self._route = routes[claimed.batch.endpoint]
        self._slots = slots
        self._path = storage.files.path(claimed.batch.input_file_id)

    async def run(self) -> None:
        """Raises LeaseLost where another server claimed the batch, or a client cancelled it."""
        batch = self._batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status in ("validating", "in_progress"):
            self._outcome = "completed" if await self._answer_in_time() else "expired"
            if self._outcome == "expired":
                await self._record_unanswered("expired")
            await self._batches.finalize(batch.id, self._outcome)
        elif batch.status == "cancelling":
            self._outcome = "cancelled"
            if batch.in_progress_at is not None:  # else its lines were not validated
                await self._record_unanswered("cancelled")
        assert self._outcome is not None
        output, errors = await self._write(True), await self._write(False)
        await self._batches.end(batch.id, self._outcome, output, errors)
        log.info("%s: %s", batch.id, self._outcome)

    # ------------------------------------------------------------------ the input file

    async def _validate(self) -> bool:
        total, errors = await asyncio.to_thread(_validate_file, self._path, self._batch.endpoint)
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
                    if number not in self._answered_lines:
                        line = decode_line(text, number, self._batch.endpoint)
                        assert isinstance(line, InputLine), "the file was validated before"
                        yield number, line

    # ------------------------------------------------------------------ answers

    async def _answer_in_time(self) -> bool:
        """Answers all lines; False where the batch expires before that."""
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
                await self._slots.acquire()
                task = asyncio.create_task(self._answer(number, line))
                task.add_done_callback(lambda _: self._slots.release())
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
        status, body = await self._call_route(line)
        while status in _RETRIED_STATUSES:
            await asyncio.sleep(_RETRY_SECONDS)
            status, body = await self._call_route(line)
        response = LineResponse(status, uuid.uuid4().hex, msgspec.Raw(body))
        await self._record(number, line, response, None)

    async def _call_route(self, line: InputLine) -> tuple[int, bytes]:
        try:
            body = bytes(line.body)
            limit = self._context.config.http.max_payload_size
            if len(body) > limit:
                raise TooLarge(f"The request body is larger than --max-payload-size ({limit} bytes).")
            if _streams(body):
                raise InvalidRequest("stream is not possible in a batch; leave it out.", param="stream")
            schedule = self._context.config.schedule
            if schedule.enable_priority_scheduling:
                body = _with_priority(body, schedule.lowest_priority)
            answer = await self._route(self._context, cast(web.Request, _Line(body)))
            assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
            return answer.status, answer.body
        except ServingError as error:
            return error.status, encode(error.to_openai())
        except Exception:
            log.exception("%s: line %r failed", self._batch.id, line.custom_id)
            return 500, encode(ServingError("The server failed to handle the request; its log says why.").to_openai())

    async def _record_unanswered(self, outcome: Status) -> None:
        self._answered_lines = await self._batches.answered(self._batch.id)
        async for number, line in self._unanswered():
            await self._record(number, line, None, _UNANSWERED_ERRORS[outcome])

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


def _validate_file(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """The number of requests in a file, and its first errors."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, text in _numbered(file):
            total += 1
            line = decode_line(text, number, endpoint)
            if isinstance(line, InputLine) and line.custom_id in seen:
                line = BatchError("duplicate_custom_id", f"custom_id {line.custom_id[:80]!r} is not unique.", number,
                                  "custom_id")
            if isinstance(line, InputLine):
                seen.add(line.custom_id)
            else:
                errors.append(line)
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
        return False  # the handler raises the error


def _with_priority(body: bytes, priority: int) -> bytes:
    """The body with this priority instead of its own: a batch can wait."""
    try:
        fields = _fields.decode(body)
    except UNREADABLE:
        return body  # the handler raises the error
    return encode(fields | {"priority": msgspec.Raw(str(priority).encode())})


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
