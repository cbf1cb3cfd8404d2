"""A trainer in a process of its own, which joins engines' process groups as SGLang's trainers do and sends weights.

It reads commands from its standard input, one JSON array a line, and answers each with a line: ``["join", address,
port, world size, group]``, ``["broadcast", file, names, flattened, group]``, ``["leave", group]``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any


class Trainer:
    """The process, from outside."""

    def __enter__(self) -> Trainer:
        self._process = subprocess.Popen([sys.executable, "-m", "baton.tests.helpers.trainer"], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def send(self, *command: Any) -> None:
        """Gives a command, which runs beside the caller."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Waits for the oldest command that was not waited for."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "done\n", f"the trainer ended: {line}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def init_custom_process_group(backend: str, address: str, port: int, world_size: int, rank: int, name: str) -> Any:
    """Makes a group beside the default one by torch's own functions, as the trainers of SGLang's users do."""
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

    limit = timedelta(seconds=60)
    store, rank, world_size = next(iter(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=limit)))
    store.set_timeout(limit)
    group, _ = _new_process_group_helper(world_size, rank, [], Backend(backend), PrefixStore(name, store),
                                         group_name=name, timeout=limit, group_desc=name)
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group


def main() -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    groups: dict[str, Any] = {}
    for line in sys.stdin:
        match json.loads(line):
            case ["join", address, port, world_size, name]:
                groups[name] = init_custom_process_group("gloo", address, port, world_size, 0, name)
            case ["broadcast", file, names, flattened, name]:
                tensors = load_file(Path(file))
                sent = [tensors[each].contiguous() for each in names]
                if flattened:
                    sent = [torch.cat([each.flatten().view(torch.uint8) for each in sent])]
                for tensor in sent:
                    dist.broadcast(tensor, src=0, group=groups[name])
            case ["leave", name]:
                dist.destroy_process_group(groups.pop(name))
        print("done", flush=True)


if __name__ == "__main__":
    main()
