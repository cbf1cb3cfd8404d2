"""Load formats: where a model's weights come from, by the values of ``--load-format``. It imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..registry import Registry

if TYPE_CHECKING:
    from ..weights.source import WeightSource
    from .server import ModelArgs


class LoadFormat(Protocol):
    """A registered source of weights, as a rule the class of a WeightSource."""

    @property
    def reads_checkpoint(self) -> bool:
        """True if it reads the checkpoint's weights, which are then downloaded from the hub."""

    def __call__(self, args: ModelArgs) -> WeightSource:
        """Opens the source; raises ConfigError where it is not there."""


LOAD_FORMATS: Registry[LoadFormat] = Registry("load format", "baton.common.weights", group="baton.load_formats")
