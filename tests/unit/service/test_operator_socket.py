"""Where operators' sockets are, who may have them, and which of them answer."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from service.config import ConfigError, ServeConfig, runtime_dirs
from service.operator_socket import check_socket, prepare, running, socket_path, why_unreachable


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this session's servers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "colibri"


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_the_session_s_folder_comes_first_and_one_of_the_user_s_is_always_there() -> None:
    user = Path(f"/tmp/colibri-{os.getuid()}")
    assert runtime_dirs({"XDG_RUNTIME_DIR": "/run/user/7"}) == (Path("/run/user/7/colibri"), user)
    assert runtime_dirs({"XDG_RUNTIME_DIR": "/run/user/7", "COLIBRI_RUNTIME": "/srv/c"}) == (Path("/srv/c"),)
    assert runtime_dirs({}) == (user,)
    with pytest.raises(ConfigError, match="COLIBRI_RUNTIME is '~no-such-user/c': there is no such user"):
        runtime_dirs({"COLIBRI_RUNTIME": "~no-such-user/c"})


def test_a_socket_is_named_by_what_the_server_listens_on(session: Path) -> None:
    assert socket_path(ServeConfig(), 50051) == session / "operator-50051.sock"
    one, two = (socket_path(ServeConfig(unix_socket=f"/run/{name}.sock"), 0) for name in ("one", "two"))
    assert one is not None
    assert one != two
    assert one.parent == session
    assert socket_path(ServeConfig(operator_socket="none"), 50051) is None
    assert socket_path(ServeConfig(operator_socket="/x/y.sock"), 50051) == Path("/x/y.sock")


def test_a_socket_that_was_asked_for_is_tried_before_a_model_is_loaded(tmp_path: Path, session: Path) -> None:
    check_socket(ServeConfig(operator_socket=str(tmp_path / "s")))
    for usual in ("auto", "none"):
        check_socket(ServeConfig(operator_socket=usual))
    assert not session.exists()
    with pytest.raises(ConfigError, match="is not a directory; make it first"):
        check_socket(ServeConfig(operator_socket=str(tmp_path / "absent" / "s")))


def test_a_folder_of_our_own_is_made_private(session: Path) -> None:
    prepare(session / "operator-1.sock", own_folder=True)
    assert stat.S_IMODE(session.stat().st_mode) == 0o700


@pytest.mark.parametrize("wrong", ["open", "link", "file"])
def test_a_folder_that_others_may_enter_is_refused(session: Path, tmp_path: Path, wrong: str) -> None:
    if wrong == "open":
        session.mkdir(mode=0o755)
        session.chmod(0o755)
    elif wrong == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        session.symlink_to(tmp_path / "elsewhere")
    else:
        session.write_text("")
    with pytest.raises(ConfigError, match="operators' sockets"):
        prepare(session / "operator-1.sock", own_folder=True)


def test_places_that_no_socket_can_be_at_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "none" / "s", "not a directory"),
        (tmp_path / "file", "is no socket"),
        (tmp_path / ("x" * 100), "more than 107 bytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepare(path, own_folder=False)


def test_a_live_socket_is_not_taken_and_a_dead_one_may_be(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(path):
        assert why_unreachable(path) == ""
        with pytest.raises(ConfigError, match="another server listens there"):
            prepare(path, own_folder=False)
    assert "refused" in why_unreachable(path)
    prepare(path, own_folder=False)


def test_what_killed_servers_left_is_swept_once_it_is_old(session: Path) -> None:
    session.mkdir(mode=0o700)
    names = old, young, live = [session / f"operator-{number}.sock" for number in (1, 2, 3)]
    listening(old).close()
    listening(young).close()
    with listening(live):
        for path in (old, live):
            os.utime(path, (1, 1))
        prepare(session / "operator-4.sock", own_folder=True)
    assert [path.exists() for path in names] == [False, True, True]


def test_only_servers_that_answer_are_found(session: Path) -> None:
    session.mkdir(mode=0o700)
    listening(session / "operator-1.sock").close()
    with listening(session / "operator-2.sock"), listening(session / "other.sock"):
        assert [path for path in running() if path.parent == session] == [session / "operator-2.sock"]
