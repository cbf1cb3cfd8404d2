"""``--load-format remote_instance``: weights that a running server sends; see ``runner.remote_instance``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..api.errors import ConfigError
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .lazy import LazyTensor
from .slots import Slot
from .source import SourceTensor


@LOAD_FORMATS.register("remote_instance")
class RemoteInstanceSource:
    """The server that ``args`` name. It sends what its ranks hold, not tensors by name: nothing is read from here."""

    reads_checkpoint = False

    def __init__(self, args: ModelArgs):
        ip, port = (args.remote_instance_weight_loader_seed_instance_ip,
                    args.remote_instance_weight_loader_seed_instance_service_port)
        self.name = f"weights of {ip}:{port}"

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        raise ConfigError(f"The {self.name} are received whole: no tensor can be read from them.")

    def find(self, name: str) -> LazyTensor:
        raise ConfigError(f"The {self.name} are received whole: {name} cannot be read from them.")

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        return self.name.encode()
