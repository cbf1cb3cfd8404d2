"""Records the experts that compute tokens."""

from __future__ import annotations

import os
import tempfile
from typing import Literal

import msgspec

from .base import GET_OR_POST, Command, Endpoint, Rank, Server
from .registry import COMMANDS


class RecordExperts(msgspec.Struct, frozen=True):
    """Record which experts compute tokens, from ``start`` to ``stop``; ``dump`` writes the current, or last, record
    into ``folder``. Refused where the engine does not count them."""

    action: Literal["start", "stop", "dump"]
    folder: str = ""


class DumpRequest(msgspec.Struct):
    output_dir: str | None = None


def run(rank: Rank, command: RecordExperts) -> str:
    record = rank.runner.expert_record
    match command.action:
        case "start":
            return record.start()
        case "stop":
            return record.stop()
        case "dump":
            return record.dump(command.folder)


async def start_expert_distribution_record(server: Server, body: None) -> str:
    """Records the experts of tokens from now on; 400 without --expert-distribution-recorder-mode.

    ``--enable-eplb`` counts them too.
    """
    return await server.execute(RecordExperts("start"))


async def stop_expert_distribution_record(server: Server, body: None) -> str:
    """Stops recording; the record can be dumped until the next start."""
    return await server.execute(RecordExperts("stop"))


async def dump_expert_distribution_record(server: Server, body: DumpRequest) -> str:
    """Writes the current or last recording as a .pt file into ``output_dir``, the folder of the environment's
    SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR or /tmp; the answer's message is the file's path."""
    folder = body.output_dir or os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR") or tempfile.gettempdir()
    return await server.execute(RecordExperts("dump", folder))


COMMANDS.register("record_experts")(Command(RecordExperts, run, (
    Endpoint("/start_expert_distribution_record", start_expert_distribution_record, methods=GET_OR_POST),
    Endpoint("/stop_expert_distribution_record", stop_expert_distribution_record, methods=GET_OR_POST),
    Endpoint("/dump_expert_distribution_record", dump_expert_distribution_record, DumpRequest,
             methods=GET_OR_POST),
), while_busy=True))
