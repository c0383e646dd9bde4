"""Tests marked numa(machine, ...) run inside virtual machines of those names; pytest outside hands their reports on.

One machine boots for all tests that name it. Inside, the same tests run under the same pytest with their fixtures (plugin
tests.numa.guest).
`make test` leaves them out and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.numa.machine import MACHINES, Machine
from tests.numa.models import make_model
from tests.numa.outside import Outside

AT_ONCE = 2
"""Machines that run: one is busy with starting programs most of the time, which takes one CPU of the host."""
MACHINE_SECONDS = 1500.0
"""Before a machine is given up, whatever its tests do."""

_MACHINES = pytest.StashKey[dict[str, Outside]]()
_LEFT_OUT = pytest.StashKey[int]()


def _inside(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("tests.numa.guest")


def _name(item: pytest.Item) -> str | None:
    """The machine a test runs in."""
    if item.get_closest_marker("numa") is None:
        return None
    assert isinstance(item, pytest.Function)
    name = item.callspec.params["machine"]
    assert isinstance(name, str)
    return name


@pytest.fixture(scope="session", autouse=True)
def machine(request: pytest.FixtureRequest) -> Machine | None:
    """The machine the test runs in."""
    return MACHINES[request.param] if hasattr(request, "param") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs once in each machine it names."""
    mark = metafunc.definition.get_closest_marker("numa")
    if mark is not None:
        metafunc.parametrize("machine", mark.args, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Which tests each machine gets."""
    if _inside(config):
        return
    tests: dict[str, list[str]] = {}
    for item in items:
        name = _name(item)
        if name is not None:
            item.add_marker(pytest.mark.timeout(0))  # the machine has its own, and a test waits for it to boot
            tests.setdefault(name, []).append(item.nodeid)
    machines: dict[str, Outside] = {}

    def start_more() -> None:
        for later in machines.values():
            if later.waiting and sum(other.busy for other in machines.values()) < AT_ONCE:
                later.start()

    machines.update({name: Outside(name, ids, timeout=MACHINE_SECONDS, meanwhile=start_more) for name, ids in tests.items()})
    config.stash[_MACHINES] = machines


def pytest_collection_finish(session: pytest.Session) -> None:
    """The model is made here, where numpy is fast."""
    if session.config.stash.get(_MACHINES, None) and not session.config.option.collectonly:
        make_model()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Outside: hands on what the machine reports."""
    name = None if _inside(item.config) else _name(item)
    if name is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[_MACHINES][name].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Machines that still run are switched off."""
    for outside in session.config.stash.get(_MACHINES, {}).values():
        outside.close()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Counts the tests that were left out."""
    if items:
        stash = items[0].config.stash
        stash[_LEFT_OUT] = stash.get(_LEFT_OUT, 0) + sum(_name(item) is not None for item in items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was left out, and what tests measured."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(f"not run: {left_out} tests in virtual machines with several NUMA nodes; `make test-numa` runs them")
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{report.nodeid}: {name}: {value}")
