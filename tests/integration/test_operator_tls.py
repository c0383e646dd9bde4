"""Operators over TCP: only with a certificate of the right authority, on both sides."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from colibri.v1 import operator_pb2 as op, operator_pb2_grpc
from ops.commands.common import CommandError
from ops.operators import OperatorTarget, operator_stub
from service.config import ConfigError
from tests.integration.serving import PATIENCE, Serving, serving


@dataclass
class Authority:
    """A certificate authority made for these tests."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.crt"

    def make(self) -> Authority:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", f"/CN={self.name}", "-keyout", self.folder / f"{self.name}.key", "-out", self.certificate)
        return self

    def issue(self, holder: str) -> tuple[Path, Path]:
        """(certificate, key) of somebody; good for this machine as a server."""
        key, request, certificate = (self.folder / f"{self.name}-{holder}.{suffix}" for suffix in ("key", "csr", "crt"))
        extensions = self.folder / "san.cnf"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={holder}",
                "-keyout", key, "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.folder / f"{self.name}.key", "-CAcreateserial",
                "-days", "2", "-extfile", extensions, "-out", certificate)
        return certificate, key


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("NOT TESTED: operators over mutual TLS. There is no openssl here to make certificates with")
    return Authority(tmp_path_factory.mktemp("tls"), "ours").make()


@pytest.fixture(scope="module")
def settings(ours: Authority) -> dict[str, str]:
    certificate, key = ours.issue("server")
    paths = {"operator_cert": certificate, "operator_key": key, "operator_ca": ours.certificate}
    return {"operator_address": "localhost:0"} | {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def server(tiny_model: Path, settings: dict[str, str]) -> Iterator[Serving]:
    with serving(tiny_model, **settings) as running:
        yield running


def target(server: Serving, ca: Path, pair: tuple[Path, Path]) -> OperatorTarget:
    return OperatorTarget(f"localhost:{server.server.operators.port}", str(pair[0]), str(pair[1]), str(ca))


def ask(where: OperatorTarget) -> list[str]:
    with operator_stub(where) as stub:
        return [model.name for model in stub.ListLoadedModels(op.ListLoadedModelsRequest(), timeout=PATIENCE).models]


def test_an_operator_with_a_certificate_is_served(server: Serving, ours: Authority) -> None:
    assert ask(target(server, ours.certificate, ours.issue("operator"))) == [server.server.default.name]


def test_a_certificate_of_another_authority_is_refused(server: Serving, ours: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").make().issue("operator")
    with pytest.raises(CommandError, match=rf"ended the connection when it had seen the certificate; is {stranger[0]} signed by"):
        ask(target(server, ours.certificate, stranger))


def test_a_server_of_another_authority_is_not_trusted(server: Serving, ours: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").make()
    words = rf"certificate is not to be trusted: unable to get local issuer certificate; .* authority in {stranger.certificate}"
    with pytest.raises(CommandError, match=words):
        ask(target(server, stranger.certificate, ours.issue("operator")))


def test_a_key_of_another_certificate_is_said(server: Serving, ours: Authority) -> None:
    certificate, key = ours.issue("operator")[0], ours.issue("another")[1]
    with pytest.raises(CommandError, match=rf"{certificate}, {key} .* do certificate and key belong together"):
        ask(target(server, ours.certificate, (certificate, key)))


def test_a_certificate_for_another_host_is_said(tiny_model: Path, settings: dict[str, str], ours: Authority) -> None:
    with serving(tiny_model, **(settings | {"operator_address": "127.0.0.2:0"})) as running:
        where = OperatorTarget(f"127.0.0.2:{running.server.operators.port}", *map(str, ours.issue("operator")), str(ours.certificate))
        with pytest.raises(CommandError, match=r"not to be trusted: .*127\.0\.0\.2.*is it for the host 127\.0\.0\.2"):
            ask(where)


def test_nobody_there_is_not_laid_to_tls(ours: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(grpc.RpcError, match="Connection refused"):
        ask(OperatorTarget(f"127.0.0.1:{port}", *map(str, ours.issue("operator")), str(ours.certificate)))


def test_an_operator_without_a_certificate_is_refused(server: Serving, ours: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(ours.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{server.server.operators.port}", credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        operator_pb2_grpc.OperatorStub(channel).ListWorkers(op.ListWorkersRequest(), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_operator_without_tls_is_refused(server: Serving) -> None:
    with grpc.insecure_channel(f"localhost:{server.server.operators.port}") as channel, pytest.raises(grpc.RpcError) as refused:
        operator_pb2_grpc.OperatorStub(channel).ListWorkers(op.ListWorkersRequest(), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_command_without_certificates_says_what_it_needs() -> None:
    with pytest.raises(CommandError, match="give --operator-cert, --operator-key, --operator-ca"), operator_stub(OperatorTarget("host:1")):
        pass


@pytest.mark.parametrize("missing", ["operator_cert", "operator_key", "operator_ca"])
def test_a_server_without_all_its_files_does_not_start(tiny_model: Path, settings: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing), serving(tiny_model, **(settings | {missing: ""})):
        pass


@pytest.mark.parametrize("wrong", ["missing", "text", "another's"])
def test_a_server_with_a_wrong_key_does_not_start(
    tiny_model: Path, settings: dict[str, str], ours: Authority, tmp_path: Path, wrong: str
) -> None:
    key = tmp_path / "key.pem"
    if wrong == "text":
        key.write_text("no key")
    elif wrong == "another's":
        key = ours.issue("another")[1]
    with pytest.raises(ConfigError, match="operator_key"), serving(tiny_model, **(settings | {"operator_key": str(key)})):
        pass
