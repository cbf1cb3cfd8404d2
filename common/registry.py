"""Registry of implementations by name: one decorator in the file of each.

A registry is declared below the code that uses its names, together with the package whose files hold the entries. The
names are read from the files' source, so that a command line lists them without importing torch; a file is imported
when one of its entries is asked for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from .api.errors import ConfigError

T = TypeVar("T")
E = TypeVar("E")


class _Declared(NamedTuple):
    """A name that a file registers: the file's module, and the options of the decorator."""

    module: str
    hidden: bool = False
    needs: Mapping[str, str] = {}
    traits: tuple[str, ...] = ()


class Registry(Generic[T]):
    """The implementations of one interface ``T``, by the names that users give them.

    ``kind`` is the noun of errors ("attention backend"). ``package``, e.g. "baton.common.attention", is the package
    whose modules (those of its subpackages are left out) register entries, as those of ``further`` packages do: with
    the registry imported at the top, and names and options as literals:

        @ATTENTION_BACKENDS.register("triton")
        class TritonBackend: ...

    ``group`` names the entry points of installed plug-ins; an entry point is an entry itself, or a module that
    registers it.
    """

    def __init__(self, kind: str, package: str = "", *further: str, group: str = ""):
        self.kind = kind
        self.packages = (package, *further) if package else ()
        self._group = group
        self._entries: dict[str, T] = {}
        self._given: dict[str, _Declared] = {}

    def register(self, *names: str, hidden: bool = False, needs: Mapping[str, str] | None = None,
                 traits: tuple[str, ...] = ()) -> Callable[[E], E]:
        """Returns a decorator that registers a class, function or object under ``names``. ``hidden`` names are taken
        but not listed. ``needs`` maps modules that the entry imports when it is used to their packages on PyPI.
        ``traits`` are words of the registry by which flags are checked.

        Raises ConfigError for a name that is registered already."""
        def add(entry: E) -> E:
            for name in names:
                if self._entries.setdefault(name, entry) is not entry:  # type: ignore[arg-type]
                    raise ConfigError(f"The {self.kind} {name} is registered twice.")
            self._given.update(dict.fromkeys(names, _Declared("", hidden, needs or {}, traits)))
            return entry
        return add

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are shown to users, sorted."""
        return tuple(sorted(self.all_names - self.hidden))

    @property
    def all_names(self) -> set[str]:
        """All names that are taken, hidden ones too. Raises ConfigError where a plug-in takes a name of another."""
        if twice := sorted(self._declared.keys() & self._plugins.keys()):
            raise ConfigError(f"The {self.kind} {twice[0]} is registered twice: a plug-in needs a name of its own.")
        return {*self._declared, *self._entries, *self._plugins}

    @property
    def hidden(self) -> set[str]:
        return {name for name in {*self._declared, *self._given} if self._options(name).hidden}

    def __contains__(self, name: object) -> bool:
        return name in self.all_names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def get(self, name: str) -> T:
        """Returns the entry; imports the file that holds it. Raises ConfigError for an unknown name, and for a plug-in
        that does not load."""
        if name in self._declared:
            importlib.import_module(self._declared[name].module)
        elif name in self._plugins and name not in self._entries:
            loaded = self._load(self._plugins[name])
            self._entries.setdefault(name, loaded)
        if name not in self._entries:
            *names, last = self.names
            raise ConfigError(f"The {self.kind} must be {', '.join(names)} or {last}, not {name!r}.")
        return self._entries[name]

    def _load(self, plugin: importlib.metadata.EntryPoint) -> Any:
        try:
            return plugin.load()
        except Exception as error:  # whatever the plug-in's file does
            raise ConfigError(f"The plug-in {plugin.value} of the {self.kind} {plugin.name} does not load: "
                              f"{type(error).__name__}: {error}") from error

    def needs_of(self, name: str) -> Mapping[str, str]:
        """Returns the modules that the entry imports when it is used, with their packages on PyPI; imports nothing."""
        return self._options(name).needs

    def has(self, name: str, trait: str) -> bool:
        """Returns True if the entry was registered with this trait; imports nothing but a plug-in. Raises ConfigError
        for one that does not load."""
        if name in self._plugins and name not in self._given:
            self.get(name)
        return trait in self._options(name).traits

    def entries(self) -> dict[str, T]:
        """Returns all entries by name, hidden ones too, those of one decorator in its order; imports all files."""
        for name in sorted(self.all_names):
            self.get(name)
        return dict(self._entries)

    def _options(self, name: str) -> _Declared:
        return self._declared.get(name) or self._given.get(name) or _Declared("")

    def module_of(self, name: str) -> str | None:
        """The module of the registry's package that registers ``name``; None for entries from elsewhere."""
        return self._declared[name].module if name in self._declared else None

    @functools.cached_property
    def _declared(self) -> dict[str, _Declared]:
        """The names that the packages' files register, read from their source."""
        found: dict[str, _Declared] = {}
        for package in self.packages:
            folder = importlib.util.find_spec(package)
            assert folder is not None and folder.submodule_search_locations is not None, package
            for file in pkgutil.iter_modules(folder.submodule_search_locations, f"{package}."):
                for name, declared in () if file.ispkg else self._read(file):
                    if name in found:
                        raise ConfigError(f"The {self.kind} {name} is registered twice.")
                    found[name] = declared
        return found

    def _read(self, file: pkgutil.ModuleInfo) -> Iterator[tuple[str, _Declared]]:
        module = file.name
        spec: Any = file.module_finder.find_spec(module, None)  # importlib's would import the package
        source = spec.loader.get_source(module) or ""
        if ".register(" not in source:
            return
        tree = ast.parse(source)
        aliases = set(self._aliases(tree, module))
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=alias), attr="register")) if alias in aliases:
                    options = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
                    for name in node.args:
                        yield ast.literal_eval(name), _Declared(module, **options)

    def _aliases(self, tree: ast.Module, module: str) -> Iterator[str]:
        """The names under which a module imports this registry."""
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                source = sys.modules.get(importlib.util.resolve_name(relative, module.rpartition(".")[0]))
                for each in node.names:
                    if getattr(source, each.name, None) is self:
                        yield each.asname or each.name

    @functools.cached_property
    def _plugins(self) -> dict[str, importlib.metadata.EntryPoint]:
        if not self._group:
            return {}
        return {point.name: point for point in importlib.metadata.entry_points(group=self._group)}


@dataclass(frozen=True)
class Choices:
    """The values of a flag: ``others``, then the names of ``registries``."""

    registries: tuple[Registry[Any], ...]
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, *registries: Registry[Any], others: tuple[str, ...] = ()) -> Choices:
        return cls(registries, others)

    @property
    def shown(self) -> tuple[str, ...]:
        return *self.others, *sorted({name for registry in self.registries for name in registry.names})

    @property
    def hidden(self) -> tuple[str, ...]:
        """Values that are taken, and not shown to users."""
        return tuple(sorted({name for registry in self.registries for name in registry.hidden}))

    def has(self, name: str, trait: str) -> bool:
        """Returns True if all entries of the name have this trait, and there is one."""
        found = [registry for registry in self.registries if name in registry]
        return bool(found) and all(registry.has(name, trait) for registry in found)

    def needs_of(self, name: str) -> dict[str, str]:
        """Returns the modules, with their packages on PyPI, that a value needs."""
        return {module: package for registry in self.registries for module, package in registry.needs_of(name).items()}
