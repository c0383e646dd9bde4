"""`make certs`: certificates that real gRPC ends accept, and no others."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from ops.certs import CertsError, main, make_certificates
from ops.cli import make_app

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="NOT TESTED: certificates. There is no openssl")
EXPERTS = "colibri.v1.Experts"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "deep" / "certs"
    assert make_certificates(folder) == ["ca", "node", "front"]
    return folder


@contextmanager
def node(folder: Path) -> Iterator[str]:
    """A server that asks for certificates as a node does; its address."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set(EXPERTS, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    pair = ((folder / "node.key").read_bytes(), (folder / "node.crt").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (folder / "ca.crt").read_bytes(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def health_of(target: str, folder: Path, role: str, *options: str) -> tuple[int, str]:
    """Exit code and words of `colibri health` with the certificate of a role."""
    files = [f"--tls-cert={folder / role}.crt", f"--tls-key={folder / role}.key", f"--tls-ca={folder}/ca.crt"]
    done = CliRunner().invoke(make_app(), ["health", target, "--service", EXPERTS, *files, *options])
    return done.exit_code, done.output


@pytest.mark.parametrize("role", ["front", "node"])
def test_front_end_and_the_nodes_own_health_check_are_let_in(certs: Path, role: str) -> None:
    with node(certs) as target:
        assert health_of(target, certs, role) == (0, "SERVING\n")


@pytest.mark.parametrize("name", ["node", "tasks.node", "colibri-nodes", "colibri-node-0.colibri-nodes"])
def test_a_nodes_certificate_holds_for_every_name_deployments_call_it_by(certs: Path, name: str) -> None:
    with node(certs) as target:
        assert health_of(target, certs, "front", "--server-name", name) == (0, "SERVING\n")


def test_another_name_is_not_believed(certs: Path) -> None:
    with node(certs) as target:
        assert health_of(target, certs, "front", "--server-name", "elsewhere.example")[0] != 0


def test_another_authority_is_refused_on_both_sides(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with node(certs) as target:
        assert health_of(target, tmp_path, "front")[0] != 0  # we do not believe it
        shutil.copy(certs / "ca.crt", tmp_path / "ca.crt")
        assert health_of(target, tmp_path, "front")[0] != 0  # it does not believe us


def test_keys_are_where_only_their_owner_reaches_them(certs: Path) -> None:
    assert stat.S_IMODE(certs.stat().st_mode) == 0o700
    assert stat.S_IMODE((certs / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((certs / "node.key").stat().st_mode) == 0o644  # Compose mounts it as it is, for another user
    assert {path.suffix for path in certs.iterdir()} <= {".crt", ".key", ".srl"}


def test_what_is_there_is_kept_until_renewal(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.crt")}
    assert make_certificates(tmp_path) == []
    assert main(["--out", str(tmp_path), "--renew", "--name", "gpu.example", "--name", "10.1.2.3"]) == 0
    assert (tmp_path / "ca.crt").read_bytes() == before["ca.crt"]
    assert (tmp_path / "node.crt").read_bytes() != before["node.crt"]
    with node(tmp_path) as target:
        assert health_of(target, tmp_path, "front", "--server-name", "gpu.example") == (0, "SERVING\n")


def test_a_name_that_certificates_lack_is_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_certificates(tmp_path, names=["::1", "old.example"])
    assert main(["--out", str(tmp_path), "--name", "old.example", "--name", "0::1"]) == 0
    assert main(["--out", str(tmp_path), "--name", "gpu.example"]) == 1
    said = capsys.readouterr().err
    assert "node.crt is there already, without gpu.example;" in said
    command = re.search(r'make certs ARGS="(.*)"', said)
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    assert main(["--out", str(tmp_path), "--name", "old.example", "--name", "::1", "--name", "gpu.example"]) == 0


def test_what_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "certs")]) == 1
    assert "file/certs: Not a directory" in capsys.readouterr().err
    with pytest.raises(CertsError, match="at least a day"):
        make_certificates(tmp_path, days=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CertsError, match="apt-get install openssl"):
        make_certificates(tmp_path)


def test_half_a_certificate_is_refused(certs: Path) -> None:
    done = CliRunner().invoke(make_app(), ["health", "127.0.0.1:1", f"--tls-cert={certs}/front.crt"])
    assert done.exit_code != 0
    assert "--tls-key, --tls-ca missing" in str(done.exception)
