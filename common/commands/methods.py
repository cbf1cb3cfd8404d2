"""Methods of ``baton.Engine`` that give commands: one for each endpoint, with the fields of its body as parameters.

``methods.pyi``, which type checkers read, is generated from the same files by ``make docs``.
"""

from __future__ import annotations

import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from ..api.errors import ConfigError
from .base import Endpoint
from .registry import all_endpoints, own_endpoints


class CommandMethods(ABC):
    """A method for each endpoint of a registered command; they return the engines' sentences, a line each, and raise
    ServingError where the endpoint answers with an error."""

    def __init__(self) -> None:
        """Adds the methods of plug-ins, and of commands that were registered since. Raises ConfigError for a plug-in
        that does not load, or whose method's name is taken."""
        endpoints = all_endpoints()
        refuse_taken_names(endpoints, vars(type(self)).keys())
        add_methods(endpoints)

    @abstractmethod
    def _run_endpoint(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> str:
        """Runs the command of an endpoint; ``arguments`` are those fields of its body that were given."""


def refuse_taken_names(endpoints: Iterable[Endpoint], taken: Collection[str]) -> None:
    """Raises ConfigError where the method of an endpoint is called as one of ``taken``, or as that of another."""
    paths: dict[str, str] = {}
    for endpoint in endpoints:
        if endpoint.name in taken or paths.setdefault(endpoint.name, endpoint.path) != endpoint.path:
            raise ConfigError(f"A plug-in's command has the path {endpoint.path}, and baton.Engine has another method "
                              f"{endpoint.name}: let the path end with another word.")


def add_methods(endpoints: Iterable[Endpoint]) -> None:
    for endpoint in endpoints:
        if endpoint.name not in vars(CommandMethods):
            setattr(CommandMethods, endpoint.name, _method(endpoint))


def _method(endpoint: Endpoint) -> Callable[..., str]:
    signature = signature_of(endpoint)

    def method(self: CommandMethods, *args: Any, **kwargs: Any) -> str:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        return self._run_endpoint(endpoint, arguments)

    method.__name__, method.__qualname__ = endpoint.name, f"CommandMethods.{endpoint.name}"
    method.__doc__ = endpoint.serve.__doc__
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def signature_of(endpoint: Endpoint) -> inspect.Signature:
    """The method's signature; its annotations are texts."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for field in sorted(endpoint.parameters, key=lambda field: not field.required):
        default = (inspect.Parameter.empty if field.required else
                   field.default if field.default is not msgspec.NODEFAULT else field.default_factory())
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=_annotation(field.type)))
    return inspect.Signature(parameters, return_annotation="str")


def _annotation(kind: Any) -> str:
    """A field's type as Python code, as wide as JSON takes it: any sequence for a tuple, a mapping for a struct."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotation(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_annotation, args))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin in (tuple, list):
        return f"Sequence[{_annotation(args[0])}]"
    if kind is type(None):
        return "None"
    return kind.__name__ if kind in (str, int, float, bool) else "Mapping[str, Any]"


add_methods(own_endpoints())
