"""Command lines derived from frozen dataclasses.

A default lives once, in the dataclass. ``flag()`` declares a field with its help text;
``parse(Config, argv)`` derives ``--flags``, reads ``--config file.yaml`` (the same names, YAML or JSON; flags
win over the file) and builds the instance. Nested dataclass fields are flattened into the same
command line, so that a configuration is composed and its user sees one list of flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import yaml

from ..api.errors import ConfigError
from ..registry import Choices
from ..version import __version__
from .foreign_flags import ForeignFlags, Given, report_mapping, words_of
from .packages import install

C = TypeVar("C")

_PATH_SUFFIXES = ("_path", "_file", "_folder", "_dir", "_template", "_plot", "certfile", "keyfile")
"""Endings of the names of flags that take a file or a folder; shells complete those with paths."""


def flag(default: Any = dataclasses.MISSING, *, help: str, names: Sequence[str] = (), repeat: bool = False,
         required: bool = False, some: bool = False, metavar: str | tuple[str, ...] | None = None,
         choices: Choices | None = None, bare: str | None = None) -> Any:
    """Declares a dataclass field that is also a command-line flag.

    ``names`` are aliases of the name that is derived from the field's. ``repeat`` lets the flag be given several
    times, each with one or more values (``--prefill URL [PORT]``); the field is then a tuple of tuples of strings.
    ``required`` fields have no default. With ``some`` a flag of many values takes at least one. ``choices`` are the
    names of a registry, for a field of type ``str``; other fields have those of their ``Literal``.
    ``bare``: the flag's value where none follows it.
    """
    metadata = {"help": help, "names": tuple(names), "repeat": repeat, "metavar": metavar, "some": some,
                "choices": choices, "bare": bare}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def nested(*, omit: Mapping[str, str]) -> Any:
    """Declares a field that is a nested configuration without some of its flags.

    ``omit`` maps names of fields to the reason why the command has no such flag; they keep their defaults.
    """
    return dataclasses.field(metadata={"omit": dict(omit)})


@dataclasses.dataclass(frozen=True)
class _Flag:
    """One field of a (possibly nested) configuration class, resolved for argparse."""

    field: dataclasses.Field[Any]
    annotation: Any
    section: str = ""
    """Name of the nested configuration that the field belongs to; empty for a field of the configuration itself."""

    @property
    def key(self) -> str:
        return self.field.name

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The values that users may give; None where any may be given."""
        named: Choices | None = self.field.metadata["choices"]
        return _shape(self.annotation)[1] if named is None else named.shown

    @property
    def hidden(self) -> tuple[str, ...]:
        """Values that are taken too, but not shown to users."""
        named: Choices | None = self.field.metadata["choices"]
        return () if named is None else named.hidden

    @property
    def spellings(self) -> tuple[str, ...]:
        return ("--" + self.key.replace("_", "-"), *self.field.metadata["names"])

    def default(self, defaults: Mapping[str, Any]) -> Any:
        """The command's default for the field, else the field's own; MISSING where the flag must be given."""
        return defaults.get(self.key, self.field.default)

    def add_to(self, parser: argparse._ActionsContainer, default: Any) -> None:
        """Adds the flag to ``parser``. ``default`` is shown in its help text; MISSING for a required flag."""
        meta = self.field.metadata
        options: dict[str, Any] = {"dest": self.key, "default": argparse.SUPPRESS, "help": self._help(default)}
        if meta["metavar"] is not None:
            options["metavar"] = meta["metavar"]
        kind, _, many = _shape(self.annotation)
        if kind is bool and self.field.default is False:
            options["action"] = "store_true"
            options.pop("metavar", None)
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
            options.pop("metavar", None)
        elif meta["repeat"]:
            options.update(action="append", nargs="+")
        else:
            options.update(type=kind, choices=self.choices, nargs=("+" if meta["some"] else "*") if many else None)
            if meta["bare"] is not None:
                options.update(nargs="?", const=meta["bare"])
        action = parser.add_argument(*self.spellings, **options)
        action.hidden = self.hidden  # type: ignore[attr-defined]
        if kind is str and self.key.endswith(_PATH_SUFFIXES):
            action.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # type: ignore[attr-defined]

    def _help(self, default: Any) -> str:
        text = self.field.metadata["help"]
        if default is dataclasses.MISSING:
            text += " (required)"
        elif default is not None and default is not False and default not in ((), ""):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            text += f" (default: {shown})"
        escaped: str = text.replace("%", "%%")
        return escaped

    def convert(self, value: Any) -> Any:
        """Converts a parsed or YAML value to the field's type; raises ConfigError where it does not fit."""
        kind, _, many = _shape(self.annotation)
        if self.field.metadata["repeat"]:
            return tuple(tuple(map(str, [item] if isinstance(item, str) else item)) for item in value)
        if value is None:
            return None
        if many:
            return tuple(_cast(kind, item,
                               self.key) for item in (value if isinstance(value, (list, tuple)) else [value]))
        value = _cast(kind, value, self.key)
        choices = self.choices
        if choices and value not in choices and value not in self.hidden:
            raise ConfigError(f"{self.key} must be one of {', '.join(map(str, choices))}, not {value!r}.")
        return value


def _cast(kind: type, value: Any, key: str) -> Any:
    if kind is float and value != value:  # nan would pass every check of a range: no number is below or above it.
        raise ConfigError(f"{key} takes a number, not nan.")
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is bool or isinstance(value, bool):
        raise ConfigError(f"{key} takes {'true or false' if kind is bool else 'a ' + kind.__name__}, not {value!r}.")
    try:
        return " ".join(words_of(value)) if kind is str else kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} takes a value of type {kind.__name__}, not {value!r}.") from None


def _shape(annotation: Any) -> tuple[type, tuple[Any, ...] | None, bool]:
    """``(element type, allowed values, is a tuple)`` of a field's annotation."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _shape(next(a for a in args if a is not type(None)))
    if origin is Literal:
        return type(args[0]), args, False
    if origin is tuple:
        kind, choices, _ = _shape(args[0])
        return kind, choices, True
    return annotation, None, False


def _flags(cls: type, section: str = "", omit: Collection[str] = ()) -> list[_Flag]:
    hints = typing.get_type_hints(cls)
    flags: list[_Flag] = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            flags.extend(_flags(hints[field.name], field.name.replace("_", " "), field.metadata.get("omit", omit)))
        elif "help" in field.metadata and field.name not in omit:
            flags.append(_Flag(field, hints[field.name], section))
    return flags


def _omitted(cls: type) -> dict[str, str]:
    """Reasons for the flags that nested configurations of ``cls`` leave out, by name of the field."""
    return {name: reason for field in dataclasses.fields(cls)
            for name, reason in field.metadata.get("omit", {}).items()}


class _Parser(argparse.ArgumentParser):
    """Refuses with one line, which names similar flags. ``omitted`` maps flags that the command lacks to the reason."""

    def __init__(self, *, omitted: Mapping[str, str], **options: Any):
        super().__init__(**options)
        self._omitted = {"--" + name.replace("_", "-"): reason for name, reason in omitted.items()}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value not in getattr(action, "hidden", ()):
            super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}; see --help.\n")

    def read(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """Returns the values of the flags in ``argv``; ends the process where one is unknown."""
        given, unknown = self.parse_known_args(argv)
        for word in unknown:
            name = word.partition("=")[0]
            if name in self._omitted:
                self.error(f"{name} is not for this command: {self._omitted[name]}")
            if word.startswith("-"):
                self.error(f"there is no flag {name}{self._suggestions(name)}")
        if unknown:
            self.error(f"{unknown[0]!r} belongs to no flag")
        return vars(given)

    @property
    def names(self) -> list[str]:
        """All spellings of all flags."""
        return [name for action in self._actions for name in action.option_strings]

    def _suggestions(self, name: str) -> str:
        words = set(name.strip("-").split("-"))
        near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.7) or sorted(
            flag for flag in self.names if len(words & set(flag.strip("-").split("-"))) >= 2)[:3]
        return f" (did you mean {' or '.join(near)}?)" if near else ""


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error(f"--print-completion needs shtab: {install('completion')}")
        print(shtab.complete(parser, args[1]))
        parser.exit()


def _parser(prog: str, description: str, flags: Sequence[_Flag], defaults: Mapping[str, Any],
            omitted: Mapping[str, str]) -> _Parser:
    required = [flag for flag in flags if flag.default(defaults) is dataclasses.MISSING]
    words = [f"--{flag.key.replace('_', '-')} {flag.key.upper()}" for flag in required]
    parser = _Parser(omitted=omitted, prog=prog, description=description, allow_abbrev=False,
                     usage=" ".join(["%(prog)s", *words, "[--FLAG [VALUE] ...]"]))
    parser.add_argument("--version", action="version", version=f"Baton {__version__}")
    parser.add_argument("--print-completion", choices=("bash", "zsh", "tcsh"), action=_PrintCompletion, help=(
        "print the shell's script for completing flags (the extra completion): eval it, or save it in the shell's "
        "folder of completions"))
    config = parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                                 help="YAML or JSON file with the flags' names; flags win over it")
    config.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # type: ignore[attr-defined]
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for flag in flags:
        if flag.section not in groups:
            groups[flag.section] = parser.add_argument_group(flag.section)
        flag.add_to(groups[flag.section], flag.default(defaults))
    return parser


def build(cls: type[C], values: Mapping[str, Any], *, foreign: ForeignFlags | None = None) -> C:
    """Builds ``cls`` from flat values by field name, as ``parse`` would; raises ConfigError for unknown names and for
    values whose type does not fit. ``foreign`` are flags of another server that are taken, too."""
    command = _Command("baton", {item.key: item for item in _flags(cls)}, foreign or ForeignFlags({}))
    entries = {"--" + name.replace("_", "-"): value for name, value in values.items()}
    own, mapped = command.read(entries, f"{cls.__name__} has no {{}}.")
    command.map(mapped, own)
    return _build(cls, own)


def _build(cls: type[C], values: dict[str, Any], omit: Collection[str] = ()) -> C:
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _build(hints[field.name], values, field.metadata.get("omit", omit))
        elif field.name in values and field.name not in omit:
            fields[field.name] = values[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"--{field.name.replace('_', '-')} is required.")
    return cls(**fields)


def _read_file(path: str) -> dict[str, Any]:
    """The entries of a ``--config`` file, by their names with dashes."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"Cannot read --config {path}: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must be a mapping of flag names to values.")
    return {"--" + str(name).replace("_", "-"): value for name, value in content.items()}


@dataclasses.dataclass(frozen=True)
class _Command:
    """The flags of a command, and those of another server that it takes."""

    prog: str
    flags: Mapping[str, _Flag]
    foreign: ForeignFlags

    def read(self, entries: Mapping[str, Any], unknown: str) -> tuple[dict[str, Any], list[Given]]:
        """Our flags among values by their names, which become those of their fields, and the mapped ones. A null means
        that a flag is not given. Raises ConfigError with ``unknown`` for names of no flag."""
        own = {spelling: flag for flag in self.flags.values() for spelling in flag.spellings}
        values: dict[str, Any] = {}
        mapped: list[Given] = []
        for name, value in entries.items():
            if name in self.foreign.flags:
                mapped += self.foreign.entry(name, value, self.prog)
            elif name not in own:
                raise ConfigError(unknown.format(name[2:].replace("-", "_")))
            elif value is not None:
                value = self.foreign.value(name, value, self.prog) if isinstance(value, str) else value
                values[own[name].key] = own[name].convert(value)
        return values, mapped

    def map(self, mapped: Sequence[Given], values: dict[str, Any], fixed: Collection[str] = ()) -> None:
        """Sets in ``values`` what other flags are here, but what is ``fixed``."""
        for given in mapped:
            updates = {key: value for key, value in given.flag.to(given.values, values).items() if key not in fixed}
            if missing := updates.keys() - self.flags.keys():
                raise ConfigError(f"{given.name} is not for this command, which has no "
                                  f"--{min(missing).replace('_', '-')}.")
            words = [word for key, value in updates.items()
                     for word in _spell(self.flags[key].spellings[0], value, repeat=False)]
            report_mapping(given, words, self.prog)
            values.update({key: self.flags[key].convert(value) for key, value in updates.items()})


def _file(command: _Command, path: str) -> tuple[dict[str, Any], list[Given]]:
    escaped = path.replace("{", "{{").replace("}", "}}")
    return command.read(_read_file(path), f"--config {escaped} sets '{{}}', which is no flag of this command.")


def parse(cls: type[C], argv: Sequence[str] | None = None, *, prog: str, description: str,
          defaults: dict[str, Any] | None = None, adjust: Callable[[C], C] | None = None,
          foreign: ForeignFlags | None = None) -> C:
    """Builds ``cls`` from a command line, or prints one sentence and exits with status 2.

    ``defaults`` override the dataclass's own. ``adjust`` derives the final configuration and may raise ConfigError, as
    may the class's ``__post_init__``. ``foreign`` are flags of another server that the command takes, too.
    """
    try:
        config = _build(cls, read_values(cls, argv, prog=prog, description=description, defaults=defaults,
                                         foreign=foreign))
        return adjust(config) if adjust else config
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_values(cls: type, argv: Sequence[str] | None, *, prog: str, description: str,
                defaults: dict[str, Any] | None = None, foreign: ForeignFlags | None = None) -> dict[str, Any]:
    """Reads the flags of ``cls`` from a command line and its ``--config`` file, by field name; as ``parse``, but raises
    ConfigError."""
    flags = {item.key: item for item in _flags(cls)}
    command = _Command(prog, flags, foreign or ForeignFlags({}))
    parser = _parser(prog, description, [*flags.values()], defaults or {}, _omitted(cls))
    words, mapped = command.foreign.split(sys.argv[1:] if argv is None else argv, parser.names, prog)
    given = parser.read(words)
    given.pop("print_completion", None)
    of_file, mapped_of_file = _file(command, path) if (path := given.pop("config", None)) else ({}, [])
    own = {key: flags[key].convert(value) for key, value in given.items()}
    values = {**(defaults or {}), **of_file, **own}
    command.map(mapped_of_file, values, own.keys())
    command.map(mapped, values)
    return values


def to_argv(config: Any) -> list[str]:
    """Returns the flags from which ``parse`` builds ``config`` again; fields at their default are left out."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            argv.extend(to_argv(value))
        elif "help" in field.metadata and value != field.default:
            argv.extend(_spell("--" + field.name.replace("_", "-"), value, field.metadata["repeat"]))
    return argv


def _spell(name: str, value: Any, repeat: bool) -> list[str]:
    if isinstance(value, bool):
        return [name if value else "--no-" + name[2:]]
    if repeat:
        return [word for item in value for word in (name, *item)]
    if isinstance(value, tuple):
        return [name, *map(str, value)]
    return [name, str(value)]
