"""Baton: large language model serving with prefill and decode on separate servers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common.config.load_format import register_load_format
    from .common.config.quantization import register_quantization
    from .common.models.registry import register_model
    from .common.weights.shared_tensors import share_tensors
    from .offline import Engine

# distinguishes this package from the registry's unrelated ``baton``: see common/__init__.py
_DISTRIBUTION = "baton-serve"
__all__ = ["Engine", "__version__", "register_load_format", "register_model", "register_quantization",
           "share_tensors"]

from .common.version import __version__  # noqa: E402

_MODULES = {"register_load_format": ".common.config.load_format", "register_model": ".common.models.registry",
            "register_quantization": ".common.config.quantization",
            "share_tensors": ".common.weights.shared_tensors"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: the router's install does not have what ``Engine`` needs."""
    if name == "Engine":
        from .common.config.packages import missing_engine, needs_engine

        if missing := missing_engine():
            raise ImportError(needs_engine(missing))
        from .offline import Engine

        return Engine
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
