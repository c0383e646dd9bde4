"""The address is tried before the model is loaded; what is wrong with it is said in the system's words."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from service.address import check_address
from service.config import ConfigError, ServeConfig
from tests.multinode.certificates import Authority


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


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, str]:
    """Settings for operators elsewhere, with files that look like certificates."""
    files = {name: tmp_path / f"{name}.pem" for name in ("operator_cert", "operator_key", "operator_ca")}
    for path in files.values():
        path.write_text("-----BEGIN CERTIFICATE-----\n")
    return {name: str(path) for name, path in files.items()}


def test_operators_address_is_tried_too(secured: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = rf"operators cannot be served on 127\.0\.0\.1:{port}: Address already in use; choose another operator_address"
        with pytest.raises(ConfigError, match=words):
            check_address(ServeConfig(port=0, operator_address=f"127.0.0.1:{port}", **secured))
    check_address(ServeConfig(port=0, operator_address=f"127.0.0.1:{port}", **secured))


def test_operators_address_that_cannot_be_had_is_named(secured: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"operators cannot be served on 192\.0\.2\.1:1: .*Cannot assign"):
        check_address(ServeConfig(port=0, operator_address="192.0.2.1:1", **secured))


def test_operators_and_clients_need_addresses_of_their_own(secured: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"operators cannot be served on 127\.0\.0\.1:{port}: .*clients"):
        check_address(ServeConfig(port=port, operator_address=f"127.0.0.1:{port}", **secured))


def test_operators_certificates_must_be_there(secured: dict[str, str]) -> None:
    Path(secured["operator_key"]).unlink()
    with pytest.raises(ConfigError, match=r"operator_key .*: No such file"):
        check_address(ServeConfig(port=0, operator_address="127.0.0.1:0", **secured))


def test_the_certificate_for_nodes_needs_its_own_key(tmp_path: Path) -> None:
    authority = Authority.made(tmp_path, "ours")
    pair, other = authority.issue("front", names="DNS:front"), authority.issue("other", names="DNS:other")
    files = {"nodes": "node:1", "nodes_cert": str(pair.certificate), "nodes_ca": str(pair.ca)}
    check_address(ServeConfig(port=0, nodes_key=str(pair.key), **files))
    with pytest.raises(ConfigError, match=r"nodes_key .*other\.key is not the key of nodes_cert .*front\.crt"):
        check_address(ServeConfig(port=0, nodes_key=str(other.key), **files))
    with pytest.raises(ConfigError, match=r"nodes_key .*absent: No such file or directory; `make certs` makes"):
        check_address(ServeConfig(port=0, nodes_key=str(tmp_path / "absent"), **files))
