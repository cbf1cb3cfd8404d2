"""The registry of model families: files register, documents name them, plug-ins are found, importing needs no torch."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.common import models
from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.models.registry import families, load_model_spec, register_model

FILES = sorted(module.name for module in pkgutil.iter_modules(models.__path__)
               if not module.ispkg and module.name != "registry")
DOCS = Path(__file__).parents[3] / "docs"


def registering_file(family) -> str:
    return getattr(family.read, "func", family.read).__module__.rpartition(".")[2]


def test_every_file_registers_a_family_and_no_other_file_does():
    assert sorted({registering_file(family) for family in families().values()}) == FILES


def test_documents_name_every_architecture_that_generates():
    named = (DOCS / "models.md").read_text()
    assert [name for name in families() if name.endswith("ForCausalLM") and f"`{name}`" not in named] == []


def test_a_name_is_registered_once():
    llama = families()["LlamaForCausalLM"]
    register_model("LlamaForCausalLM", read=llama.read, build=llama.build, defaults=llama.defaults)  # the same again
    with pytest.raises(ConfigError, match="LlamaForCausalLM is registered by both baton.common.models.llama and "
                                          "baton.common.models.mistral: register one"):
        register_model("LlamaForCausalLM", read=families()["MistralForCausalLM"].read, build=llama.build)


def test_families_are_read_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["none"]}))
    code = ("import sys; from baton.common.models.registry import families, load_model_spec; "
            "from baton.common.config.model_config import ModelConfig; "
            "from baton.common.config.server import ModelArgs; args = ModelArgs('none', is_embedding=True)\n"
            "for name, family in families().items():\n"
            "    family.read(ModelConfig.complete(name, {'num_experts_per_tok': 2}, None, family.defaults, args))\n"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def plug_in(folder: Path, text: str, value: str) -> str:
    """Installs a package with one module into ``folder``, and returns code that finds it there."""
    (folder / "toy_family.py").write_text(text)
    about = folder / "toy_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[baton.models]\ntoy = {value}\n")
    return (f"import sys; sys.path.insert(0, {str(folder)!r})\n"
            "from baton.common.models.registry import families\n")


@pytest.mark.parametrize("value,text", [
    ("toy_family", "import baton\nfrom baton.common.models.llama import read, build\n"
                   "baton.register_model('ToyForCausalLM', read=read, build=build)"),
    ("toy_family:register", "import baton\nfrom baton.common.models.llama import read, build\n"
                            "def register():\n"
                            "    baton.register_model('ToyForCausalLM', read=read, build=build)"),
])
def test_installed_packages_register_families(tmp_path, value, text):
    code = plug_in(tmp_path, text, value) + "assert 'ToyForCausalLM' in families() and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plug_in_that_cannot_be_loaded_is_named(tmp_path):
    code = plug_in(tmp_path, "import nothing_of_this_name", "toy_family") + (
        "from baton.common.api.errors import ConfigError\n"
        "try:\n    families()\nexcept ConfigError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("The model plug-in toy = toy_family cannot be loaded (ModuleNotFoundError("), done


def test_an_unknown_architecture_lists_the_registered_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoneForCausalLM"]}))
    with pytest.raises(ConfigError) as error:
        load_model_spec(ModelArgs(str(tmp_path)))
    assert all(name in str(error.value) for name in families() if name.endswith("ForCausalLM"))
