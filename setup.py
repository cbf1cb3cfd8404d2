"""Maps the checkout's root onto the import package ``baton`` (see pyproject.toml for the rest)."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("common", "kernels", "kvtransfer", "prefill", "decode", "router", "simulate", "lang")

PACKAGES = [f"baton.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])]


class BuildPackages(build_py):
    """The root is a package, and this file stands in it: it builds the wheel and does not belong into it."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [found for found in modules if found[:2] != ("baton", "setup")]


setup(
    version=re.search(r'__version__ = "(.+?)"', Path("common/version.py").read_text()).group(1),
    package_dir={"baton": "."},
    packages=["baton", *PACKAGES],
    package_data={"baton": ["py.typed"],
                  "baton.common.tinychat": [f"{name}/*" for name in ("checkpoint", "eagle3", "nextn", "draft")],
                  "baton.common.tokenizer": ["chat_templates/*.jinja"],
                  "baton.common.commands": ["*.pyi"], "baton.kernels": ["tuning/*.json"],
                  "baton.router.monitoring": ["dashboard.html"], "baton.simulate.costs": ["tables/*.json"],
                  "baton.simulate.validation": ["measured/*.json"]},
    cmdclass={"build_py": BuildPackages},
)
