"""One Docker engine, one image and one project for all tests of containers; what one test disturbs it puts right again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ops.models import TINY_FILE
from tests.compose import engine as engines
from tests.compose.stack import Stack, clone, free_ports
from tests.fault.load import Answer, Load
from tests.multinode.watching import local_answers, short_requests

BUILD_S = 900
CALL_S = 60
STREAMS = 8


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    reason = engines.why_not()
    if reason:
        pytest.skip(f"NOT TESTED: containers. {reason}")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(engines.engine())
        except engines.NoEngine as none:
            pytest.skip(f"NOT TESTED: containers. {none}")
        engines.import_base(made)
        yield made


@pytest.fixture(scope="session")
def expected() -> list[Answer]:
    """What the model answers in one process, without nodes."""
    return local_answers(TINY_FILE)


@pytest.fixture(scope="session")
def built(engine: engines.Engine, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The project as a newcomer has it, cloned and built."""
    made = Stack(engine, clone(tmp_path_factory.mktemp("clone")), free_ports())
    made.compose("build", seconds=BUILD_S)
    arguments = ("--target", "build", "--build-arg", f"BASE={engines.BASE_IMAGE}", "--tag", engines.BUILD_IMAGE)
    engine.docker("build", *arguments, str(made.folder), seconds=BUILD_S)  # of layers that are there already
    return made


@pytest.fixture(scope="session")
def stack(built: Stack) -> Iterator[Stack]:
    """The project, up."""
    try:
        built.up()
        yield built
    finally:
        built.compose("down", "-v", "--timeout", "20")


@pytest.fixture
def whole(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The project with its three nodes, also after a test that failed; what the containers said is shown then."""
    stack.up("--no-recreate")
    failed = request.session.testsfailed
    yield stack
    if request.session.testsfailed > failed:
        print(stack.compose("logs", "--no-color", "--tail", "60"))


class Under:
    """Streams of known answers against a stack."""

    def __init__(self, target: str, expected: list[Answer], *, patient: bool = False) -> None:
        self._target, self._expected, self._patient = target, expected, patient

    @contextmanager
    def load(self) -> Iterator[Load]:
        """STREAMS streams from begin to end of the block; none may fail or be answered wrongly."""
        load = Load(self._target, self._expected, streams=STREAMS, timeout=CALL_S, todo=short_requests(), patient=self._patient)
        load.start()
        try:
            flows(load)
            yield load
            flows(load)
        finally:
            load.stop()
        assert [error for stream in load.streams for error in stream.failed] == []
        assert [difference for stream in load.streams for difference in stream.wrong] == []
        assert all(stream.calls for stream in load.streams)


def flows(load: Load, *, tokens: int = 400, seconds: float = 30) -> None:
    """Waits for so many more tokens."""
    goal = load.tokens + tokens
    engines.until(lambda: load.tokens >= goal, f"{tokens} more tokens come", seconds=seconds)


@pytest.fixture
def under(whole: Stack, expected: list[Answer]) -> Under:
    return Under(whole.target, expected)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another authority than the clone's."""
    from ops.certs import make_certificates

    folder = tmp_path_factory.mktemp("strangers")
    make_certificates(folder)
    return folder
