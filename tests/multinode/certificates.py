"""Authorities and certificates for nodes and front ends."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, and the authority its holder trusts. PEM files."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def node(self) -> list[str]:
        """As options of a node."""
        return ["--tls-cert", str(self.certificate), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    @property
    def front(self) -> dict[str, str]:
        """As settings of a front end."""
        paths = {"NODES_CERT": self.certificate, "NODES_KEY": self.key, "NODES_CA": self.ca}
        return {"NODES_INSECURE": "off"} | {name: str(path) for name, path in paths.items()}


@dataclass(frozen=True, slots=True)
class Authority:
    """One that signs; `made` makes it."""

    folder: Path
    name: str

    @classmethod
    def made(cls, folder: Path, name: str) -> Authority:
        authority = cls(folder, name)
        _openssl(
            "req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", authority._file("key"), "-out", authority.certificate
        )
        return authority

    @property
    def certificate(self) -> Path:
        return self._file("crt")

    def issue(self, holder: str, *, names: str, days: int = 2) -> Pair:
        """names: the subjectAltName, as openssl writes it. days: below 0 for one that has run out."""
        key, request, certificate, extensions = (self._file(f"{holder}.{suffix}") for suffix in ("key", "csr", "crt", "cnf"))
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl("req", *_KEY, "-subj", f"/CN={holder}", "-keyout", key, "-out", request)
        signer = ("-CA", self.certificate, "-CAkey", self._file("key"), "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signer, "-days", days, "-extfile", extensions, "-out", certificate)
        return Pair(certificate, key, self.certificate)

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.name}-{suffix}"


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
