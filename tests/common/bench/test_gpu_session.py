"""The GPU session's plans: no test file is forgotten, and no test of a file that is run in parts."""

from __future__ import annotations

from pathlib import Path

from baton.tests.bench.gpu_session import PLANS, parts

GPU = Path(__file__).parents[2] / "gpu"


def test_every_file_has_a_step():
    named = {Path(word).name for plan in PLANS.values() for step in plan for word in step.argv}
    assert not [file.name for file in GPU.rglob("test_*.py") if file.name not in named]
    assert all(len({step.name for step in plan}) == len(plan) for plan in PLANS.values()), "logs overwrite each other"


def test_parts_are_the_whole():
    first, second, rest = (step.argv[-1] for step in parts("fp8", 10.0, "a and b", "c"))
    for has in range(8):
        names = {name: bool(has >> bit & 1) for bit, name in enumerate("abc")}
        assert sum(bool(eval(words, {}, dict(names))) for words in (first, second, rest)) == 1, names
