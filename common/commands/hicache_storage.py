"""The storage behind host memory: empties it, and attaches one to a running server or takes it away, as SGLang does."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

import msgspec

from ..api.errors import ConfigError, Conflict, InvalidRequest, WorkerUnavailable
from ..config.server.tiers import PrefetchPolicy, TierArgs
from .base import GET_OR_POST, Broadcast, Command, Endpoint, Rank, Server, messages_by_worker
from .registry import COMMANDS

if TYPE_CHECKING:
    from ..kvcache.storage.storage import Storage
    from ..scheduler.tier_prefetch import Prefetches

CLEAR_SECONDS = 600.0
_PATH = "/hicache/storage-backend"
_BROADCAST = Broadcast(combine=lambda answers: {"workers": dict(answers)})


class ClearStorage(msgspec.Struct, frozen=True):
    """Remove all objects from the storage."""


class AttachStorage(msgspec.Struct, frozen=True):
    """Open a storage. ``options`` is the JSON object of --hicache-storage-backend-extra-config."""

    backend: str
    options: str = "{}"
    prefetch_policy: PrefetchPolicy | None = None


class DetachStorage(msgspec.Struct, frozen=True):
    """Close the storage; its objects stay."""


class StorageStatus(msgspec.Struct, frozen=True):
    """Describe the storage."""


class AttachRequest(msgspec.Struct):
    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: PrefetchPolicy | None = None
    hicache_write_policy: str | None = None


def _prefetches(rank: Rank) -> Prefetches:
    """Raises InvalidRequest for a server whose host memory keeps no pages."""
    loads = rank.batcher.loads
    if loads is None or loads.prefetches is None:
        raise InvalidRequest("This server keeps no pages in host memory: start it with --enable-hierarchical-cache.")
    return loads.prefetches


def _attached(rank: Rank) -> Storage | None:
    return cast("Storage | None", _prefetches(rank).storage)


def run_clear(rank: Rank, command: ClearStorage) -> Future[str]:
    if (storage := _attached(rank)) is None:
        raise InvalidRequest("No storage is attached.")
    answer: Future[str] = Future()

    def ended(done: Future[None]) -> None:
        if (error := done.exception()) is None:
            answer.set_result("The storage is empty.")
        else:
            answer.set_exception(WorkerUnavailable(f"The storage could not be cleared: {error}."))

    storage.clear().add_done_callback(ended)
    return answer


def run_attach(rank: Rank, command: AttachStorage) -> str:
    """All ranks attach it, or none: requests would wait for different pages."""
    prefetches, storage, refusal = _prefetches(rank), None, "another rank could not open it"
    if (attached := _attached(rank)) is not None:
        raise InvalidRequest(f"The storage {attached.name} is attached; detach it first.")
    if rank.config.parallel.pp_size > 1:
        raise InvalidRequest("A storage has pages of all layers, and the stages of --pp-size have a share of them: "
                             "start the server without --pp-size.")
    try:
        args = TierArgs(enable_hierarchical_cache=True, hicache_storage_backend=command.backend,
                        hicache_storage_backend_extra_config=command.options)
        storage = prefetches.open(command.backend, args.storage_config)
    except (ConfigError, OSError) as error:
        refusal = str(error).removesuffix(".")
    if not rank.tp.all_true(storage is not None) or storage is None:
        if storage is not None:
            storage.close()
        raise InvalidRequest(f"The storage {command.backend} was not attached: {refusal}.")
    prefetches.attach(storage, command.prefetch_policy, args.prefetch_limits)
    return f"The storage {command.backend} is attached."


def run_detach(rank: Rank, command: DetachStorage) -> str:
    if (storage := _attached(rank)) is None:
        return "No storage was attached."
    _prefetches(rank).close()
    return f"The storage {storage.name} is detached; its objects stay."


def run_status(rank: Rank, command: StorageStatus) -> str:
    tiers, loads = rank.config.tiers, rank.batcher.loads
    prefetches = None if loads is None else loads.prefetches
    storage = None if prefetches is None else _attached(rank)
    facts: dict[str, object] = {
        "hicache_storage_backend": None if storage is None else storage.name,
        "hicache_storage_prefetch_policy": None if prefetches is None else prefetches.policy,
        "hicache_write_policy": tiers.hicache_write_policy if tiers.enable_hierarchical_cache else None}
    if storage is not None:
        counters = storage.counters
        facts |= {"healthy": storage.healthy, "queued_writes": storage.num_queued_writes,
                  "pages_read": counters.read_pages, "pages_written": counters.written_pages,
                  "errors": dict(counters.errors)}
    return json.dumps({"success": True, **facts})


async def clear_hicache_storage_backend(server: Server, body: None) -> str:
    """Removes all pages from the storage of --hicache-storage-backend, those of other servers, too; the prefix cache
    and host memory keep theirs (``/flush_cache``)."""
    return await server.execute(ClearStorage())


async def attach_hicache_storage_backend(server: Server, body: AttachRequest) -> str:
    """Opens a storage behind the host memory of --enable-hierarchical-cache, from which later prompts are prefetched
    and to which pages are written from now on. Fields as the flags of the same names, the extra configuration without
    ``@``. 400 while requests run, while another storage is attached, or where it cannot be opened: then nothing
    changed. ``hicache_write_policy`` may only be that of the start."""
    policy = server.context.config.tiers.hicache_write_policy
    if body.hicache_write_policy not in (None, policy):
        raise InvalidRequest(f"The write policy is {policy} since the start; leave hicache_write_policy out, or start "
                             f"the server with --hicache-write-policy {body.hicache_write_policy}.",
                             param="hicache_write_policy")
    options = body.hicache_storage_backend_extra_config_json or "{}"
    if options.startswith("@"):
        raise InvalidRequest("hicache_storage_backend_extra_config_json must be a JSON object, not a file's name.",
                             param="hicache_storage_backend_extra_config_json")
    return await _when_idle(server, AttachStorage(body.hicache_storage_backend, options,
                                                  body.hicache_storage_prefetch_policy))


async def detach_hicache_storage_backend(server: Server, body: None) -> str:
    """Closes the storage, after what is queued has been written; its objects stay. 400 while requests run."""
    return await _when_idle(server, DetachStorage())


async def hicache_storage_backend(server: Server, body: None) -> str:
    """Names the storage that is attached (null: none) with its policies, and says whether it answers, how many pages
    wait to be written, and how many were read and written."""
    return await server.execute(StorageStatus())


async def _when_idle(server: Server, command: msgspec.Struct) -> str:
    try:
        return await server.execute(command)
    except Conflict as error:
        raise InvalidRequest(error.message, code=error.code) from None


COMMANDS.register("clear_hicache_storage")(Command(ClearStorage, run_clear, (
    Endpoint("/clear_hicache_storage_backend", clear_hicache_storage_backend, methods=GET_OR_POST,
             broadcast=Broadcast(slow=True, combine=messages_by_worker)),
    Endpoint(f"{_PATH}/clear", clear_hicache_storage_backend, method_name="clear_hicache_storage",
             broadcast=Broadcast(slow=True, combine=messages_by_worker))),
    while_busy=True, timeout=CLEAR_SECONDS))
COMMANDS.register("attach_hicache_storage")(Command(AttachStorage, run_attach, (
    Endpoint(_PATH, attach_hicache_storage_backend, AttachRequest, methods=("PUT",), broadcast=_BROADCAST,
             method_name="attach_hicache_storage_backend"),)))
COMMANDS.register("detach_hicache_storage")(Command(DetachStorage, run_detach, (
    Endpoint(_PATH, detach_hicache_storage_backend, methods=("DELETE",), broadcast=_BROADCAST,
             method_name="detach_hicache_storage_backend"),)))
COMMANDS.register("hicache_storage_status")(Command(StorageStatus, run_status, (
    Endpoint(_PATH, hicache_storage_backend, methods=("GET",), returns_json=True, broadcast=_BROADCAST,
             method_name="hicache_storage_backend"),), while_busy=True))
