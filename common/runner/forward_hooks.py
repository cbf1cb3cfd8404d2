"""Hooks of an operator's own on what a model's modules compute (--forward-hooks)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from ..api.errors import ConfigError
from ..config.server.debug import HookSpec
from ..models.decoder.module_calls import ModuleCall

log = logging.getLogger("baton.engine")

Hook = Callable[[Any, tuple[Any, ...], Any], Any]
"""torch's: ``hook(module, args, output)`` returns what replaces the output, or None."""


def add_hooks(specs: Iterable[HookSpec], calls: Iterable[ModuleCall]) -> None:
    """Makes hooks by their factories, and calls them after the modules whose names match, in the order of ``specs``.
    Raises ConfigError for a factory that cannot be imported or fails, and for names that match no module."""
    calls = list(calls)
    for spec in specs:
        hook = _make(spec)
        found = [call for call in calls if any(fnmatchcase(name, pattern) for name in call.names
                                               for pattern in spec.target_modules)]
        if not found:
            raise ConfigError(f"--forward-hooks: no module of this model matches {', '.join(spec.target_modules)}; its "
                              f"modules are {', '.join(call.names[0] for call in calls[:12])}, …")
        for call in found:
            call.wrap(lambda compute, hook=hook, owner=call.owner: _hooked(compute, hook, owner))  # type: ignore[misc]
        log.info("the forward hook %s is called after %d modules", spec.name or spec.hook_factory, len(found))


def _make(spec: HookSpec) -> Hook:
    module, _, name = spec.hook_factory.replace(":", ".").rpartition(".")
    try:
        hook: Hook | None = getattr(importlib.import_module(module), name)(spec.config)
    except Exception as error:  # whatever an operator's code raises
        raise ConfigError(f"--forward-hooks: {spec.hook_factory} makes no hook: {type(error).__name__}: "
                          f"{error}.") from None
    if not callable(hook):
        raise ConfigError(f"--forward-hooks: {spec.hook_factory} must return a function, not {hook!r}.")
    return hook


def _hooked(compute: Callable[..., Any], hook: Hook, owner: Any) -> Callable[..., Any]:
    @wraps(compute)
    def hooked(*args: Any, **options: Any) -> Any:
        output = compute(*args, **options)
        replaced = hook(owner, args, output)
        return output if replaced is None else replaced

    return hooked
