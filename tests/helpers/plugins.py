"""Installed packages with entry points, for tests of plug-ins in processes of their own."""

from __future__ import annotations

from pathlib import Path


def install_plugin(folder: Path, group: str, name: str, value: str) -> str:
    """Installs a package without modules of its own into ``folder``, with the entry point ``name = value``. Returns
    the folder, as PYTHONPATH takes it."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return str(folder)
