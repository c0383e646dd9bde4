"""The address is tried before the model is loaded; what is wrong with it is said in the system's words."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from service.address import check_address
from service.config import ConfigError, ServeConfig


def test_a_free_port_is_fine_and_left_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    check_address(ServeConfig(port=port))
    check_address(ServeConfig(port=port))


def test_a_taken_port_is_named_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another port"):
            check_address(ServeConfig(port=port))


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:50051: Cannot assign requested address"):
        check_address(ServeConfig(host="192.0.2.1"))


def test_a_socket_path_must_be_short_and_its_folder_there(tmp_path: Path) -> None:
    check_address(ServeConfig(unix_socket=str(tmp_path / "s")))
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "no" / "s", "make it first"), (tmp_path / "file", "no socket"), (tmp_path / ("x" * 200), "shorter")):
        with pytest.raises(ConfigError, match=words):
            check_address(ServeConfig(unix_socket=str(path)))


def test_a_socket_is_taken_from_nobody_who_listens_but_from_one_who_was_killed(tmp_path: Path) -> None:
    config = ServeConfig(unix_socket=str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(config.unix_socket)
        listening.listen()
        with pytest.raises(ConfigError, match="another server does"):
            check_address(config)
    check_address(config)
