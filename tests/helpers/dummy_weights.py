"""Dummy weights for layers that no model holds."""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.config.server import ModelArgs
from baton.common.weights.dummy_source import DummySource
from baton.common.weights.loader import load_weights, silent
from baton.common.weights.slots import Slot


def fill_dummy(slots: Iterable[Slot], seed: int) -> None:
    load_weights(DummySource(ModelArgs("", random_seed=seed)), slots, silent, tied=False)
