"""`make certs`: an authority of its own and certificates for mutual TLS between front ends and nodes. Operators' certificates
are better signed by another one (`--out certs/operators`), else every node may operate its front end.

    python -m ops.certs [--out certs] [--days 365] [--name DNS_OR_IP ...]

Needs openssl. What is there is kept; `--renew` makes all but the authority anew, with further names for instance. OUT is for its
owner only. The keys in it can be read by anyone who reaches them, because Compose mounts them as they are and the container's user is
another one than their owner.
"""

from __future__ import annotations

import argparse
import ipaddress
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The names a node is asked for by: Compose and Swarm, Kubernetes' headless service and its pods, the host itself.
NODE_NAMES = ("node", "tasks.node", "colibri-nodes", "*.colibri-nodes", "colibri-nodes.colibri.svc.cluster.local", "localhost", "127.0.0.1")
FRONT_NAMES = ("front", "colibri", "colibri.colibri.svc.cluster.local", "localhost", "127.0.0.1")
ROLES = {"node": NODE_NAMES, "front": FRONT_NAMES}
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class CertsError(Exception):
    """Certificates could not be made; the sentence says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ops.certs", description="An authority and certificates for mutual TLS.")
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder (certs)")
    parser.add_argument("--days", type=int, default=365, help="how long certificates hold (365); the authority ten times as long")
    parser.add_argument("--name", action="append", default=[], help="a further DNS name or address of nodes and front ends; repeat it")
    parser.add_argument("--renew", action="store_true", help="make certificates anew that are there; the authority stays")
    chosen = parser.parse_args(arguments)
    try:
        made = make_certificates(chosen.out, days=chosen.days, names=chosen.name, renew=chosen.renew)
    except CertsError as error:
        print(f"certs: {error}", file=sys.stderr)
        return 1
    print(f"{chosen.out}: {', '.join(made) or 'all there, nothing made (--renew makes certificates anew)'}")
    return 0


def make_certificates(folder: Path, *, days: int = 365, names: Sequence[str] = (), renew: bool = False) -> list[str]:
    """Makes what is missing in `folder`; the names of the files made, without endings. Raises CertsError."""
    if shutil.which("openssl") is None:
        raise CertsError("no openssl found. Debian: apt-get install openssl")
    if days < 1:
        raise CertsError(f"--days {days}: a certificate holds at least a day")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise CertsError(f"{folder}: {error.strerror}") from None
    made = []
    if not (folder / "ca.crt").exists():
        _authority(folder, days * 10)
        made.append("ca")
        renew = True  # what another authority signed is worth nothing
    for role, own in ROLES.items():
        if renew or not (folder / f"{role}.crt").exists():
            _certificate(folder, role, [*own, *names], days)
            made.append(role)
        elif lacking := set(map(_alternative, names)) - (there := _names_in(folder / f"{role}.crt")):
            others = sorted(name.partition(":")[2] for name in there - set(map(_alternative, own)))
            raise CertsError(_say_lacking(folder, role, sorted(name.partition(":")[2] for name in lacking), [*others, *names]))
    return made


def _names_in(certificate: Path) -> set[str]:
    """As _alternative writes them."""
    said = _openssl("x509", "-noout", "-ext", "subjectAltName", "-in", certificate)
    words = (word.strip() for word in ",".join(said.splitlines()[1:]).split(","))
    return {_alternative(word.partition(":")[2]) for word in words if word}


def _say_lacking(folder: Path, role: str, lacking: Sequence[str], names: Sequence[str]) -> str:
    options = "".join(f" --name {name}" for name in dict.fromkeys(names)) + (f" --out {folder}" if folder != Path("certs") else "")
    remedy = f'make certs ARGS="--renew{options}"'
    return f"{folder / role}.crt is there already, without {', '.join(lacking)}; certificates with all names are made by {remedy}"


def _authority(folder: Path, days: int) -> None:
    usage = ("-addext", "basicConstraints=critical,CA:TRUE,pathlen:0", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    files = ("-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    _openssl("req", "-x509", *_KEY, "-days", str(days), "-subj", "/CN=colibri", *usage, *files)
    (folder / "ca.key").chmod(0o600)  # never mounted anywhere


def _certificate(folder: Path, role: str, names: Sequence[str], days: int) -> None:
    """A key and a certificate, for both ends of a connection: a node's own health check is a client."""
    key, request, wanted, done = (folder / f"{role}.{ending}" for ending in ("key", "csr", "ext", "crt"))
    lines = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    lines.append("subjectAltName=" + ",".join(_alternative(name) for name in names))
    try:
        wanted.write_text("\n".join(lines) + "\n")
        _openssl("req", *_KEY, "-subj", f"/CN=colibri-{role}", "-keyout", key, "-out", request)
        signed_by = ("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signed_by, "-days", str(days), "-extfile", wanted, "-out", done)
        key.chmod(0o644)
    finally:
        for scratch in (request, wanted):
            scratch.unlink(missing_ok=True)


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name}"


def _openssl(*arguments: str | Path) -> str:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CertsError(f"openssl {arguments[0]} failed: {said[-1]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
