"""Alerts in ``deploy/prometheus``, by Prometheus's own tool: each fires in its case, and none in a healthy cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "deploy/prometheus"
INSTALLED = Path(sys.executable).parent / "promtool"
PROMTOOL = str(INSTALLED) if INSTALLED.exists() else shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (tests/deploy/fetch_tools.py)")
@pytest.mark.parametrize("argv", ["check config prometheus.yml", "test rules alerts.test.yml"])
def test_prometheus_accepts(argv):
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *argv.split()], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    tests = yaml.safe_load((FOLDER / "alerts.test.yml").read_text())["tests"]
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    checked = [(check["alertname"], bool(check["exp_alerts"])) for test in tests for check in test["alert_rule_test"]]
    assert sorted(checked) == sorted([(name, fires) for name in names for fires in (True, False)])
