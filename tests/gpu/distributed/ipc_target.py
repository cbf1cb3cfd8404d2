"""A process whose GPU memory others write: test_kv_ipc.py's."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from baton.kvtransfer.backends.base import Region
from baton.kvtransfer.backends.ipc import IpcBackend

PAGES, PAGE_BYTES = 64, 1 << 20


def region_of(pool: torch.Tensor) -> Region:
    return Region(pool.data_ptr(), pool.numel(), pool.get_device())


def main(device: int, pipe: Connection) -> None:
    """Registers a zeroed pool, the second half of one allocation; answers with what it holds when asked."""
    torch.cuda.set_device(device)
    pool = torch.zeros(2, PAGES, PAGE_BYTES, dtype=torch.uint8, device="cuda")[1]
    backend = IpcBackend()
    backend.register([region_of(pool)], [PAGES])
    torch.cuda.synchronize()
    pipe.send(backend.local_metadata())
    while (asked := pipe.recv()) is not None:
        pipe.send((pool.cpu().numpy() if asked == "content" else backend.completion_flags()).tobytes())
