"""The registry of model families: documents name them, plug-ins are found, importing needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.server import ModelArgs
from baton.common.models.registry import MODELS, family_of, load_model_spec, register_model

DOCS = Path(__file__).parents[3] / "docs"
SHIPPED = [name for name in MODELS if MODELS.module_of(name)]
"""The architectures that Baton's own files register."""


def test_documents_name_every_architecture_that_generates():
    named = (DOCS / "models.md").read_text()
    assert [name for name in SHIPPED if name.endswith("ForCausalLM") and f"`{name}`" not in named] == []
    assert [name for name in SHIPPED if not (family_of(name).title and family_of(name).notes)] == []


def test_a_name_is_registered_once():
    llama = family_of("LlamaForCausalLM")
    with pytest.raises(ConfigError, match="The model architecture LlamaForCausalLM is registered twice."):
        register_model("LlamaForCausalLM", read=llama.read, blocks=llama.blocks)
    assert family_of("LlamaForCausalLM") is llama


def test_a_family_has_blocks_or_a_builder():
    llama = family_of("LlamaForCausalLM")
    with pytest.raises(ConfigError, match="register_model of NeitherForCausalLM: give blocks"):
        register_model("NeitherForCausalLM", read=llama.read)
    assert all((family_of(name).blocks is None) != (family_of(name).build is None) for name in MODELS)


def test_families_are_read_without_torch():
    code = ("import sys; from baton.common.models.registry import MODELS, family_of; "
            "from baton.common.config.model_config import ModelConfig; "
            "from baton.common.config.server import ModelArgs; args = ModelArgs('.', is_embedding=True)\n"
            "for name in MODELS:\n"
            "    family = family_of(name)\n"
            "    given = {'num_experts_per_tok': 1, 'max_position_embeddings': 2048}\n"
            "    given = {key: value for key, value in given.items() if not family.defaults.get(key)}\n"
            "    family.read(ModelConfig.complete(name, given, None, family.defaults, args))\n"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def run_with_plug_in(folder: Path, text: str, value: str) -> subprocess.CompletedProcess[str]:
    """Installs a package with one module into ``folder``, and asks a process for the family that it registers."""
    (folder / "toy_family.py").write_text(text)
    about = folder / "toy_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[baton.models]\nToyForCausalLM = {value}\n")
    code = (f"import sys; sys.path.insert(0, {str(folder)!r})\n"
            "from baton.common.api.errors import ConfigError\n"
            "from baton.common.models.registry import MODELS, family_of\n"
            "assert 'ToyForCausalLM' in MODELS.names\n"
            "try:\n    print(family_of('ToyForCausalLM').read.__module__, 'torch' in sys.modules)\n"
            "except ConfigError as error:\n    print(error)")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


IMPORTS = "import baton\nfrom baton.common.models.llama import read, blocks\n"


@pytest.mark.parametrize("value,text,answer", [
    ("toy_family", IMPORTS + "baton.register_model('ToyForCausalLM', read=read, blocks=blocks)",
     "baton.common.models.llama False"),
    ("toy_family:TOY",
     IMPORTS + "from baton.common.models.registry import ModelFamily\nTOY = ModelFamily(read, blocks)",
     "baton.common.models.llama False"),
    ("toy_family", "import nothing_of_this_name",
     "The plug-in toy_family of the model architecture ToyForCausalLM does not load: ModuleNotFoundError"),
    ("toy_family", "", "The plug-in of the model architecture ToyForCausalLM does not register it"),
])
def test_installed_packages_register_families(tmp_path, value, text, answer):
    done = run_with_plug_in(tmp_path, text, value)
    assert done.stdout.startswith(answer), done


def test_an_unknown_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoneForCausalLM"]}))
    with pytest.raises(ConfigError) as error:
        load_model_spec(ModelArgs(str(tmp_path)))
    assert "NoneForCausalLM is not supported: use one of docs/models.md's, or of another model" in str(error.value)
