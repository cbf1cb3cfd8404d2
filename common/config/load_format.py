"""Load formats: where a model's weights come from, by the values of ``--load-format``. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..registry import Registry

if TYPE_CHECKING:
    from ..weights.source import WeightSource
    from .server import ModelArgs

E = TypeVar("E")


class LoadFormat(Protocol):
    """A registered source of weights, as a rule the class of a WeightSource."""

    @property
    def reads_checkpoint(self) -> bool:
        """True if it reads the checkpoint's weights, which are then downloaded from the hub."""

    def __call__(self, args: ModelArgs) -> WeightSource:
        """Opens the source; raises ConfigError where it is not there."""


LOAD_FORMATS: Registry[LoadFormat] = Registry("load format", "baton.common.weights", group="baton.load_formats")


def register_load_format(*names: str) -> Callable[[E], E]:
    """Returns a decorator that registers a LoadFormat under values of ``--load-format``. Servers find those of
    installed packages by entry points of the group ``baton.load_formats`` with the same names."""
    return LOAD_FORMATS.register(*names)
