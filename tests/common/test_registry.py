"""Registries: names without imports, one decorator an entry, plug-ins."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint

import pytest

from baton.common import registry as module
from baton.common.api.errors import ConfigError
from baton.common.registry import Choices, Registry

FILES = {
    "__init__.py": "",
    "names.py": "from baton.common.registry import Registry\nTOYS = Registry('toy', 'toys_of_a_test')\n"
                "OTHERS = Registry('other', 'toys_of_a_test')\n",
    "ball.py": "from .names import TOYS\n\n\n@TOYS.register('ball', 'sphere')\nclass Ball: ...\n",
    "cube.py": "from toys_of_a_test.names import OTHERS, TOYS as t\n\nCUBE = t.register('cube')(object())\n"
               "OTHERS.register('die')(CUBE)\n",
    "secret.py": "import missing_package\nfrom .names import TOYS\n\n\n"
                 "@TOYS.register('secret', hidden=True, traits=('dark',), needs={'missing_package': 'missing'})\n"
                 "def make(): ...\n",
    "helper.py": "import atexit\natexit.register(print, 'not a toy')\n",
    "inner/__init__.py": "",
    "inner/deep.py": "from ..names import TOYS\n\n\n@TOYS.register('deep')\nclass Deep: ...\n",
}


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A package with a registry; files that are not asked for are not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / "toys_of_a_test" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toys_of_a_test" / name).write_text(text)
    importlib.invalidate_caches()
    yield importlib.import_module("toys_of_a_test.names")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toys_of_a_test"]:
        del sys.modules[name]


def test_names_are_known_without_importing_their_files(toys):
    assert toys.TOYS.names == ("ball", "cube", "sphere")
    assert (*toys.OTHERS,) == ("die",)
    assert "secret" in toys.TOYS and "secret" not in toys.TOYS.names and "deep" not in toys.TOYS
    assert toys.TOYS.module_of("cube") == "toys_of_a_test.cube"
    assert "toys_of_a_test.ball" not in sys.modules


def test_an_entry_is_imported_when_it_is_asked_for(toys):
    ball = toys.TOYS.get("sphere")
    assert ball is toys.TOYS.get("ball") is sys.modules["toys_of_a_test.ball"].Ball
    assert "toys_of_a_test.cube" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="missing_package"):
        toys.TOYS.get("secret")


def test_traits_are_known_without_importing(toys):
    assert toys.TOYS.has("secret", "dark") and not toys.TOYS.has("ball", "dark") and not toys.TOYS.has("kite", "dark")
    choices = Choices.of(toys.TOYS, toys.OTHERS)
    assert choices.has("secret", "dark") and not choices.has("ball", "dark") and not choices.has("kite", "dark")


def test_all_entries(toys, tmp_path):
    (tmp_path / "toys_of_a_test" / "secret.py").unlink()
    importlib.invalidate_caches()
    entries = toys.TOYS.entries()
    assert set(entries) == {"ball", "sphere", "cube"} and entries["ball"] is entries["sphere"]
    assert (*entries,).index("sphere") == (*entries,).index("ball") + 1


def test_an_unknown_name_is_a_sentence_with_the_shown_ones(toys):
    with pytest.raises(ConfigError, match="^The toy must be ball, cube or sphere, not 'kite'.$"):
        toys.TOYS.get("kite")


def test_a_name_is_taken_once(toys, tmp_path):
    toys.TOYS.register("kite", needs={"wind": "air"}, traits=("flies",))(print)
    assert toys.TOYS.needs_of("kite") == {"wind": "air"}
    assert toys.TOYS.has("kite", "flies") and not toys.TOYS.has("kite", "rolls")
    toys.TOYS.register("kite")(print)  # the same entry
    assert toys.TOYS.get("kite") is print and toys.TOYS.module_of("kite") is None
    with pytest.raises(ConfigError, match="The toy kite is registered twice."):
        toys.TOYS.register("kite")(len)
    toys.TOYS.register("ball")(print)  # of a file that is not imported yet
    with pytest.raises(ConfigError, match="The toy ball is registered twice."):
        toys.TOYS.get("ball")


def test_two_files_cannot_register_one_name(toys, tmp_path):
    (tmp_path / "toys_of_a_test" / "copy_of_ball.py").write_text(FILES["ball.py"])
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="The toy ball is registered twice."):
        _ = toys.TOYS.names


def test_plug_ins_are_entry_points(monkeypatch):
    points = {"toys": [EntryPoint("dump", "json:dumps", "toys")]}
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: points[group])
    toys: Registry[object] = Registry("toy", group="toys")
    assert toys.names == ("dump",)
    assert toys.get("dump") is importlib.import_module("json").dumps


def test_a_plug_in_may_be_a_module_that_registers(monkeypatch):
    toys: Registry[object] = Registry("toy", group="toys")

    class Point:
        name = "len"

        def load(self) -> object:
            toys.register("len", traits=("long",))(len)
            return importlib

    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: [Point()])
    assert toys.has("len", "long") and not toys.has("len", "short")
    assert toys.get("len") is len


def test_a_plug_in_that_does_not_load_is_a_sentence(monkeypatch):
    points = [EntryPoint("kite", "missing_package.kite:Kite", "toys")]
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: points)
    toys: Registry[object] = Registry("toy", group="toys")
    with pytest.raises(ConfigError,
                       match="The plug-in missing_package.kite:Kite of the toy kite does not load: .*missin"):
        toys.get("kite")


def test_a_plug_in_needs_a_name_of_its_own(toys, monkeypatch):
    points = [EntryPoint("ball", "json:dumps", "toys")]
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: points)
    registry: Registry[object] = Registry("toy", "toys_of_a_test", group="toys")
    monkeypatch.setattr(toys, "TOYS", registry)
    with pytest.raises(ConfigError, match="The toy ball is registered twice: a plug-in needs a name of its own."):
        _ = registry.names


def test_choices_of_a_flag(toys):
    choices = Choices.of(toys.TOYS, toys.OTHERS, others=("auto",))
    assert choices.shown == ("auto", "ball", "cube", "die", "sphere") and choices.hidden == ("secret",)
    assert choices.needs_of("secret") == {"missing_package": "missing"} and choices.needs_of("auto") == {}
