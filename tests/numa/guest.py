"""Plugin of the pytest inside a virtual machine: writes every report to /job/reports, a line each, for the pytest outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPORTS = "reports"
_OUT = Path("/job") / REPORTS


class _Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._out = _OUT.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._out.write(json.dumps(data) + "\n")
        self._out.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Reporter(config))
