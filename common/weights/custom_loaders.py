"""Functions of users that convert what a trainer sends, by ``--custom-weight-loader``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from ..api.errors import ConfigError, InvalidRequest
from ..config.server import ModelArgs
from .pushed import NamedTensor


class LoadedModel:
    """The model that a loader gets: ``load_weights`` takes tensors by the names of the checkpoint."""

    def __init__(self) -> None:
        self.tensors: list[NamedTensor] = []

    def load_weights(self, named_tensors: Iterable[NamedTensor]) -> None:
        self.tensors.extend(named_tensors)


WeightLoader = Callable[[LoadedModel, list[NamedTensor]], object]
"""``loader(model, named_tensors)`` calls ``model.load_weights`` with whole tensors of the checkpoint's names."""


def custom_loaders(args: ModelArgs) -> dict[str, WeightLoader]:
    """Imports the functions of ``--custom-weight-loader``, by their paths; raises ConfigError."""
    found: dict[str, WeightLoader] = {}
    for path in args.custom_weight_loader:
        module, _, name = path.rpartition(".")
        try:
            loader = getattr(importlib.import_module(module), name)
        except Exception as error:  # code of users
            raise ConfigError(f"--custom-weight-loader {path} cannot be imported ({type(error).__name__}: {error}): "
                              "give package.module.function, and its folder in PYTHONPATH.") from None
        if not callable(loader):
            raise ConfigError(f"--custom-weight-loader {path} is no function.")
        found[path] = loader
    return found


def load_by(path: str, loader: WeightLoader, tensors: list[NamedTensor]) -> list[NamedTensor]:
    """Returns the tensors of the checkpoint's names that a loader makes; raises InvalidRequest where it fails."""
    model = LoadedModel()
    try:
        loader(model, tensors)
    except Exception as error:  # code of users
        raise InvalidRequest(f"load_format: {path} failed with {type(error).__name__}: {error}.",
                             param="load_format") from error
    return model.tensors
