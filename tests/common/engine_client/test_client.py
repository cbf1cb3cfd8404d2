from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.common.api.errors import Conflict, InvalidRequest, Overloaded, TransferFailed, WorkerUnavailable
from baton.common.api.messages import (
    Failed,
    Finish,
    Generate,
    Loading,
    Output,
    OutputBatch,
    OutputExtras,
    PromptUsage,
    Ready,
    StartFailed,
)
from baton.common.api.sampling import SamplingParams
from baton.common.commands.flush_cache import FlushCache
from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.engine.rank_spec import RankSpec
from baton.common.engine_client.client import EngineClient
from baton.common.engine_client.output_stream import OutputStream
from baton.common.engine_client.rank_processes import RankProcesses
from baton.tests.helpers.fake_engine import EOS, Seed, rank_main


class Engine:
    """A client with real rank processes."""

    def __init__(self, *flags: str, size: int = 1, max_requests: int = 8):
        self.config = parse(ServerConfig, ["--model-path", "none", *flags], prog="test", description="")
        self.size = size
        self.startup: list[Loading | Ready | StartFailed] = []
        self.exits: list[tuple[int, int]] = []
        self.client = EngineClient(max_requests, self.startup.append)
        self.stopped = False

    async def start(self) -> None:
        self.client.start()
        channel = self.client.channel
        specs = [RankSpec(self.config, rank, self.size, channel.to_engine, channel.from_engine, "")
                 for rank in range(self.size)]
        self.ranks = RankProcesses(rank_main, specs, lambda rank, code: self.exits.append((rank, code)))
        self.ranks.start()
        await until(lambda: any(isinstance(message, Ready | StartFailed) for message in self.startup))

    async def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        self.client.shut_down()
        await self.ranks.stop(3.0)
        await self.client.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


def request(rid: str, ids: list[int], **sampling: object) -> Generate:
    return Generate(rid, ids, SamplingParams(**sampling))  # type: ignore[arg-type]


async def collect(stream: AsyncIterator[Output]) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def test_start_generate_flush_stop(engine: Engine) -> None:
    client = engine.client
    assert engine.startup == [Loading("loading weights", 0.5), Ready(10_000, 512)]
    assert await collect(client.generate(request("a", [5, 6, 7]))) == [5, 6, 7, EOS]
    assert (await client.state()).counters["finished_requests"] == 1
    assert await client.control(FlushCache())
    assert client.num_open == 0
    pids, folder = engine.ranks.pids, client.channel.folder
    await engine.stop()
    assert engine.exits == [] and not glob.glob(folder)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_many_streams_share_the_channel(engine: Engine) -> None:
    prompts = [[3 + i, 4 + i, 5 + i] for i in range(8)]
    actual = await asyncio.gather(*(
        collect(engine.client.generate(request(str(i), ids))) for i, ids in enumerate(prompts)))
    assert actual == [[*ids, EOS] for ids in prompts]


async def test_failures_come_after_the_tokens_before_them(engine: Engine) -> None:
    tokens: list[int] = []
    with pytest.raises(TransferFailed, match="vanished"):
        async for output in engine.client.generate(request("a", [5, 6, 7], seed=Seed.FAIL_LATER)):
            tokens += output.token_ids
    assert tokens == [5, 6]
    assert engine.client.num_open == 0


async def test_a_failure_is_not_missed_by_a_late_reader(engine: Engine) -> None:
    with engine.client.open([request("a", [5, 6, 7], seed=Seed.FAIL_LATER)]) as stream:
        await until(lambda: engine.client.num_open == 0)
        assert stream.live
        assert [token for output in await stream.next() for token in output.token_ids] == [5, 6]
        assert stream.live
        with pytest.raises(TransferFailed):
            await stream.next()


async def test_limits_and_duplicates(engine: Engine) -> None:
    client = engine.client
    with client.open([request("a", [5], seed=Seed.SILENT)]):
        with pytest.raises(Conflict, match="'a' is in use"):
            await collect(client.generate(request("a", [5])))
        with pytest.raises(Overloaded, match="of 8 at most"), \
                client.open([request(f"b{i}", [5]) for i in range(8)]):
            pass
        with pytest.raises(InvalidRequest, match="asks for 9 answers, and the server holds 8"), \
                client.open([request(f"b{i}", [5]) for i in range(9)]):
            pass
        with pytest.raises(Conflict, match="Requests run"):
            await client.control(FlushCache())
    assert client.num_open == 0
    await until_idle(client)


async def until_idle(client: EngineClient) -> None:
    while (await client.state()).num_running:
        await asyncio.sleep(0.01)


async def ends_aborted(stream: OutputStream) -> None:
    outputs = []
    while stream.live:
        outputs += await stream.next()
    assert outputs and all(output.finish == Finish("abort") for output in outputs)


async def test_aborts(engine: Engine) -> None:
    client = engine.client
    with client.open([request("a-0", [5], seed=Seed.SILENT), request("a-1", [5], seed=Seed.SILENT)]) as stream:
        client.abort_group("a")
        await ends_aborted(stream)
    with client.open([request("b", [5], seed=Seed.SILENT)]) as stream:
        client.abort("")
        await ends_aborted(stream)
    task = asyncio.create_task(collect(client.generate(request("c", [5], seed=Seed.SILENT))))
    await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert client.num_open == 0
    await until_idle(client)
    assert (await client.state()).counters["aborted_requests"] == 4


async def test_late_outputs_of_a_request_do_not_reach_its_successor(engine: Engine) -> None:
    """A client that leaves and reuses its id, or a router that retries, is faster than the engine."""
    client = engine.client
    for _ in range(2):
        with client.open([request("a", [5], seed=Seed.SILENT)]):
            pass
        with client.open([request("a", [5, 6, 7])]) as stream:
            client.dispatch(OutputBatch.of([Output("a", [99], OutputExtras(PromptUsage(1, 0), Finish("length")))]))
            client.dispatch(Failed("a", "aborted", "The one before was aborted."))
            with pytest.raises(Conflict, match="'a' is in use"):
                await collect(client.generate(request("a", [5])))
            actual = []
            while stream.live:
                actual += await stream.next()
        assert {output.rid for output in actual} == {"a"}
        assert [token for output in actual for token in output.token_ids] == [5, 6, 7, EOS]
        with client.open([request("a", [5], seed=Seed.SILENT)]) as stream:
            client.abort_group("a")
            await ends_aborted(stream)
    assert client.num_open == 0
    await until_idle(client)


async def test_a_dead_engine_fails_everything(engine: Engine) -> None:
    client = engine.client
    with client.open([request("a", [5], seed=Seed.SILENT)]) as stream:
        os.kill(engine.ranks.pids[0], signal.SIGKILL)
        await until(lambda: engine.exits)
        assert engine.exits == [(0, -signal.SIGKILL)]
        client.engine_died("Rank 0 is gone.")
        with pytest.raises(WorkerUnavailable, match="Rank 0 is gone"):
            await stream.next()
    with pytest.raises(WorkerUnavailable):
        await collect(client.generate(request("b", [5])))
    with pytest.raises(WorkerUnavailable):
        await client.state()


async def test_a_rank_that_cannot_start_gives_the_reason() -> None:
    engine = Engine("--random-seed", "13")
    await engine.start()
    assert engine.startup == [StartFailed("The fake engine was told to fail.")]
    await until(lambda: engine.exits == [(0, 1)])
    await engine.stop()


async def test_ranks_that_do_not_listen_are_ended() -> None:
    engine = Engine(size=2)
    await engine.start()
    assert engine.ranks.alive == 2
    engine.client.shut_down()
    began = time.monotonic()
    await engine.ranks.stop(0.2)
    assert engine.ranks.alive == 0 and time.monotonic() - began < 5
    await engine.client.close()


async def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_client\n"
        "async def main():\n"
        "    engine = test_client.Engine()\n"
        "    await engine.start()\n"
        "    print(engine.client.channel.folder, engine.ranks.pids[0], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n")
    parent = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    out, _ = await parent.communicate()
    folder, pid = out.split()

    def all_ended() -> bool:
        status = Path(f"/proc/{int(pid)}/status")
        return not status.exists() or "State:\tZ" in status.read_text()

    await until(all_ended, 5.0)
    for name in ("to_engine", "from_engine"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder.decode(), name))
    os.rmdir(folder)
