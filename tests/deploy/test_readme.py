"""README and docs/: generated pages are those of the code; links, commands, flags, metrics and files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from baton.common.config.cli import _flags, parse
from baton.docs import generate
from baton.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md"),
                *(ROOT / "deploy").rglob("*.md")])
WRITTEN = [path for path in PAGES if path.name not in generate.PAGES]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
CONFIGS = {command.name: command.config for command in generate.COMMANDS}
CONFIGS |= {"launch_prefill": CONFIGS["launch_server"], "launch_decode": CONFIGS["launch_server"]}
OTHERS = {"--kv-events-config", "--torchao-config", "--pd-separated", "--router", "--enable", "--no", "--no-deps",
          "--build", "--from-literal", "--gpus", "--nodes", "--gpus-per-node", "--now", "--num-nodes", "--secret",
          "--system", "--display-name", "--container-image-uri", "--container-ports", "--container-health-route",
          "--container-predict-route", "--container-env-vars"}
"""SGLang's, what flags begin with, and those of pip, docker, kubectl and other tools that deploy."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---------------------------------------------------------------------- generated pages


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_page_is_up_to_date(name):
    assert (ROOT / "docs" / name).read_text() == generate.PAGES[name](), "run: make docs"


def test_every_flag_and_metric_is_in_the_reference():
    flags, metrics = (ROOT / "docs/flags.md").read_text(), (ROOT / "docs/metrics.md").read_text()
    missing = [flag.key for config in (CONFIGS["launch_server"], RouterConfig, CONFIGS["launch_cluster"])
               for flag in _flags(config) if f"`--{flag.key.replace('_', '-')}`" not in flags]
    assert missing == []
    assert len(re.findall(r"^\| `baton:", metrics, re.MULTILINE)) > 35
    assert len(re.findall(r"^\| `baton_router_", metrics, re.MULTILINE)) > 20


def test_an_error_of_a_file_that_no_family_names_is_noticed():
    assert {generate.family_of(path).title for path, _ in generate.startup_errors()} == {
        family.title for family in generate.FAMILIES}
    with pytest.raises(LookupError):
        generate.family_of("common/new_folder/file.py")


# ---------------------------------------------------------------------- links and files


def prose(path: Path) -> str:
    """The page without its code blocks and inline code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path: Path) -> set[str]:
    """Fragments of a page's headings; of equal ones the later get a number."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = generate.anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", ""))
        number = 0
        while (name := f"{plain}-{number}" if number else plain) in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = prose(path)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", text)
    broken = []
    for target in targets:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, fragment = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.exists() or (fragment and (page.suffix != ".md" or fragment not in anchors(page))):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"- {path.name}" not in nav]
    assert missing == []


SOURCE = re.compile(r"`((?:common|kernels|kvtransfer|prefill|decode|router|lang|tests|deploy|examples|docs"
                    r"|requirements)/[\w./-]*\w/?)`")


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_files_that_are_named_exist(path):
    missing = [name for name in SOURCE.findall(path.read_text())
               if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists() and "NAME" not in name]
    assert missing == []


def test_modules_that_are_run_exist():
    for path in WRITTEN:
        for name in re.findall(r"python -m\s+(baton[\w.]+)|`(baton\.[\w.]+):\w+`", path.read_text()):
            assert find_spec(name[0] or name[1]) is not None, f"{name} in {name_of(path)}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=name_of)
def test_pictures_stand_alone(path):
    tree = ElementTree.fromstring(path.read_text())
    assert tree.get("viewBox") and tree.find("{http://www.w3.org/2000/svg}title") is not None
    assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", ""), "loads from elsewhere"


# ---------------------------------------------------------------------- glossary


def glossary() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    return [(term.strip(), name, file) for term, name, file in rows]


def test_glossary_names_files_that_hold_its_terms():
    rows = glossary()
    assert len(rows) > 80
    wrong = [(term, name, file) for term, name, file in rows if not (ROOT / file).is_file()
             or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (ROOT / file).read_text())]
    assert wrong == []
    terms = [term.lower() for term, _, _ in rows]
    assert len(set(terms)) == len(terms)


# ---------------------------------------------------------------------- commands and flags


def commands(path: Path) -> Iterator[list[str]]:
    """Our commands in a page's shell blocks, without pipes and comments."""
    for block in re.findall(r"^```bash\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.split(" | ")[0], comments=True)
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                del words[0]
            if words and words[0].removeprefix(".venv/bin/") in CONFIGS:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def test_command_lines_are_accepted():
    found = [(name_of(path), words) for path in WRITTEN for words in commands(path)]
    assert len([where for where, _ in found if where == "README.md"]) >= 5 and len(found) > 20
    for where, (name, *argv) in found:
        argv = [__file__ if word == "FILE" else word for word in argv]
        if name == "launch_cluster":  # flags of the router pass through
            argv = [word for word in argv if not word.startswith("--router-")]
        defaults = {"model_path": "tinychat"} if name in ("launch_cluster", "bench_kvtransfer") else {}
        try:
            parse(CONFIGS[name], argv, prog=name, description="", defaults=defaults)
        except SystemExit:
            pytest.fail(f"{where}: {name} {' '.join(argv)}")


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in WRITTEN:
        for target in re.findall(r"(?:`|^)make ([a-z]+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} in {name_of(path)}"


def spellings(config: type) -> set[str]:
    found = {"--config", "--help", "--version", "--print-completion"}
    for item in _flags(config):
        name = item.key.replace("_", "-")
        found |= {f"--{name}", *item.field.metadata["names"], *({f"--no-{name}"} if item.field.default is True else ())}
    return found


def test_every_flag_that_is_named_exists():
    known = set().union(*map(spellings, CONFIGS.values()))
    known |= {f"--router-{flag[2:]}" for flag in spellings(RouterConfig)}
    own_parsers = [path for folder in ("tests/bench", "tests/kernels", "tests/tinychat", "examples")
                   for path in (ROOT / folder).glob("*.py")]
    for path in own_parsers:
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text()))
    named = {flag: name_of(path) for path in WRITTEN for flag in FLAG.findall(path.read_text())}
    assert {flag: where for flag, where in named.items() if flag not in known | OTHERS} == {}


TABLES = {"| flag | default | why |": CONFIGS["launch_server"], "| flag | sglang-router | Baton | why |": RouterConfig}


def default_rows() -> Iterator[tuple[type, list[str], str]]:
    """``(configuration, flags, their default)`` of each row of the tables that state defaults."""
    for path in WRITTEN:
        lines = iter(path.read_text().splitlines())
        for line in lines:
            if (config := TABLES.get(line)) is not None:
                next(lines)
                while (row := next(lines, "")).startswith("|"):
                    cells = [cell.strip() for cell in row.split("|")]
                    yield config, FLAG.findall(cells[1]), cells[-3]


def shown(default: Any) -> set[str]:
    if default is None or default is False:
        return {"", "none", "off"}
    return {f"{default:g}" if isinstance(default, float) else str(default), *({"off"} if default == 0 else ())}


def test_defaults_are_stated_as_they_are():
    rows = list(default_rows())
    assert len(rows) > 18
    for config, flags, stated in rows:
        known = {name: item.field.default for item in _flags(config)
                 for name in (f"--{item.key.replace('_', '-')}", *item.field.metadata["names"])}
        for flag in flags:
            assert stated in shown(known[flag]), (flag, stated, known[flag])


METRIC = re.compile(r"\bbaton[:_][a-z0-9_]+")


def test_metrics_that_are_named_exist():
    known = set(METRIC.findall((ROOT / "docs/metrics.md").read_text())) | {
        "baton_serve", "baton_only", "baton_simulate", "baton_plan"}
    for path in (path for path in WRITTEN if path.name != "CHANGELOG.md"):
        assert {name for name in METRIC.findall(path.read_text()) if name not in known} == set(), name_of(path)


# ---------------------------------------------------------------------- the site, and the README's size


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("material") is None, reason="needs the extra docs")
def test_site_builds_without_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)", page.read_text())
        assert [url for url in loaded if not url.startswith("https://squidfunk.github.io")] == [], page.name
