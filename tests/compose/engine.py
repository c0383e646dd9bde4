"""A Docker engine of the tests' own, and a base image made of Debian packages: no registry of images is asked."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "compose"
"""Base image and the layers of builds are kept here: making them takes some minutes, and is done again only for what has changed."""
BASE_IMAGE = "colibri-test-base"
IMAGE = "colibri-test:latest"
BUILD_IMAGE = "colibri-test-build"
"""The image's first stage: under a name, so that its layers are kept for the next run."""
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
TOOLS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
USUAL_SOCKET = "/var/run/docker.sock"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PASSED_ON = ("PIP_INDEX_URL", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""What says how this machine reaches PyPI; a build's containers are told the same."""
BACK_S = 40
"""For a container to be restarted, found again and given its share."""
_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, *, seconds: float) -> _T:
    """Polls until the condition is true and returns what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.1)
    return found


def why_not() -> str:
    """What keeps this machine from running containers for tests; empty if nothing does."""
    if os.geteuid() != 0:
        return "it takes root to start a Docker engine"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"Debian packages are missing: {' '.join(missing)}"
    if _dockerd_runs() and not _answers(Engine(_usual_socket())):
        where = f"{_usual_socket()} (set DOCKER_HOST=unix://...)"
        return f"a Docker engine runs here and does not answer at {where}; two would share one bridge and one set of firewall rules"
    return ""


def _usual_socket() -> Path:
    return Path(os.environ.get("DOCKER_HOST", USUAL_SOCKET).removeprefix("unix://"))


def _dockerd_runs() -> bool:
    return any(process.info["name"] == "dockerd" for process in psutil.process_iter(["name"]))


class NoEngine(Exception):
    """This machine does not let a Docker engine start; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running Docker engine."""

    socket: Path

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {"DOCKER_HOST": f"unix://{self.socket}"}

    def docker(self, *arguments: str, seconds: float = 120) -> str:
        """What `docker ...` prints. AssertionError with its words if it fails."""
        return run(["docker", *arguments], environ=self.environ, seconds=seconds)


def run(command: Sequence[str], *, environ: dict[str, str], seconds: float, folder: Path = ROOT) -> str:
    """Output of a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=seconds, cwd=folder, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """The engine that runs here, or one of our own. Raises NoEngine."""
    if not _dockerd_runs():
        with _own_engine() as made:
            yield made
        return
    usual = Engine(_usual_socket())
    try:
        yield usual
    finally:
        for image in (IMAGE, BUILD_IMAGE, BASE_IMAGE):
            usual.docker("image", "rm", "--force", image)


@contextlib.contextmanager
def _own_engine() -> Iterator[Engine]:
    """Starts an engine; stops it, and leaves neither containers nor firewall policy behind. Raises NoEngine."""
    folder = Path(tempfile.mkdtemp(prefix="colibri-docker-"))
    made = Engine(folder / "docker.sock")
    policy = _forward_policy()
    command = ["dockerd", f"--data-root={CACHE}/docker", f"--exec-root={folder}/exec", f"--host=unix://{made.socket}"]
    command.append(f"--pidfile={folder}/dockerd.pid")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: _is_up(made, process, folder / "log"), "the Docker engine answers", seconds=60)
        _tidy(made)
        yield made
        _tidy(made)
    finally:
        process.terminate()
        process.wait(60)
        subprocess.run(["iptables", "-P", "FORWARD", policy], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _tidy(made: Engine) -> None:
    """Removes what a run that was cut short has left, and images that newer ones replaced."""
    subprocess.run(["docker", "swarm", "leave", "--force"], env=made.environ, capture_output=True, check=False)
    left = made.docker("ps", "--all", "--quiet").split()
    if left:
        made.docker("rm", "--force", "--volumes", *left)
    for kind in ("network", "volume", "image"):
        made.docker(kind, "prune", "--force")


def _is_up(made: Engine, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        last = log.read_text(errors="replace").splitlines()[-1:]
        raise NoEngine(f"dockerd has ended with exit code {process.returncode}: {''.join(last)}")
    return _answers(made)


def _answers(made: Engine) -> bool:
    return subprocess.run(["docker", "info"], env=made.environ, capture_output=True, check=False).returncode == 0


def _forward_policy() -> str:
    """dockerd makes it DROP, which would outlive it."""
    said = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise NoEngine(f"iptables: {said.stderr.strip()}")
    return said.stdout.split()[2]


def import_base(engine: Engine) -> None:
    """A Debian with Python as BASE_IMAGE, which trusts whom this machine trusts."""
    archive = CACHE / f"base-{SUITE}.tar"
    if not archive.exists():
        _make_base(archive)
    if engine.docker("image", "ls", "--quiet", BASE_IMAGE):
        return  # importing it again would give it another identity, and all layers above it would be built anew
    settings = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    changes = [part for name, value in settings.items() for part in ("--change", f"ENV {name}={value}")]
    engine.docker("import", *changes, str(archive), BASE_IMAGE, seconds=120)


def _make_base(archive: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="colibri-base-") as folder:
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, folder, _mirror()]
        run(command, environ=dict(os.environ), seconds=600)
        if AUTHORITIES.exists():
            shutil.copy(AUTHORITIES, folder + str(AUTHORITIES))
        for package in Path(folder, "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        unfinished = archive.with_suffix(".part")
        run(["tar", "-C", folder, "-cf", str(unfinished), "."], environ=dict(os.environ), seconds=120)
        unfinished.rename(archive)


def _mirror() -> str:
    """Where this machine has its Debian packages from."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for source in sources:
        found = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(https?://\S*debian/?)(?:\s|$)", _text(source), re.MULTILINE)
        if found:
            return found[1]
    return "http://deb.debian.org/debian"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
