"""What a virtual machine boots: Debian's kernel, unpacked and not installed, and an initial file system made from it. Kept in build/numa/.

The machine's root is the host's `/`, read-only under an overlay in memory, so that the kernel's modules, one static busybox and the script
`init` beside this file are all that has to be made. Nothing here needs root.
"""

from __future__ import annotations

import gzip
import lzma
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "numa"
INIT = Path(__file__).with_name("init")
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
QEMU = "qemu-system-x86_64"


class MachineError(RuntimeError):
    """No virtual machine can be had here, or one ended without having done its job; says what to do."""


@dataclass(frozen=True, slots=True)
class Image:
    """What qemu is given."""

    kernel: Path
    initrd: Path


def make_image(cache: Path = CACHE) -> Image:
    """The image, made at the first call. MachineError if something is missing."""
    if platform.machine() != "x86_64":
        raise MachineError("the virtual machines run the host's own programs on an emulated x86-64: they need such a host")
    if shutil.which(QEMU) is None:
        raise MachineError(f"there is no {QEMU}: on Debian, apt-get install qemu-system-x86")
    tree, busybox = cache / "kernel", cache / "busybox"
    if not tree.exists():
        _unpack(_kernel_package(), tree)
    if not busybox.exists():
        _unpack("busybox-static", busybox)
    kernels = sorted(tree.glob("boot/vmlinuz-*"))
    if not kernels:
        raise MachineError(f"{tree}/boot has no vmlinuz-*: remove {tree} to have it fetched again")
    initrd = cache / "initrd.gz"
    sources = [kernels[0], INIT, Path(__file__)]
    if not initrd.exists() or initrd.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        _write(initrd, gzip.compress(_archive(tree, busybox / "bin" / "busybox"), compresslevel=1))
    return Image(kernels[0], initrd)


# ---------------------------------------------------------------- Debian packages, fetched and unpacked


def _kernel_package() -> str:
    """The package that linux-image-amd64 stands for. The cloud kernel is of no use: it lacks the shared file system (9p)."""
    depends = _run("apt-cache", "depends", "linux-image-amd64")
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise MachineError("apt-cache knows no linux-image-amd64: run apt-get update")
    return found[1]


def _unpack(package: str, tree: Path) -> None:
    """Fetches a package and unpacks it into `tree`, which appears only when it is whole."""
    work = tree.with_name(f"{tree.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    (work / "tree").mkdir(parents=True)
    try:
        _download(package, work)
        (archive,) = work.glob("*.deb")
        _run("dpkg-deb", "-x", str(archive), str(work / "tree"))
        (work / "tree").rename(tree)
    finally:
        shutil.rmtree(work)


def _download(package: str, folder: Path) -> None:
    try:
        _run("apt-get", "download", "-q", package, cwd=folder)
    except MachineError:
        if os.geteuid() != 0:
            raise
        _run("apt-get", "update", "-q")  # lists may be missing or name a version that is gone
        _run("apt-get", "download", "-q", package, cwd=folder)


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        raise MachineError(
            f"there is no {command[0]} to fetch a kernel with. Elsewhere than on Debian, unpack a kernel package (boot/, lib/modules/) "
            f"into {CACHE}/kernel and put a static busybox at {CACHE}/busybox/bin/busybox"
        ) from missing
    if done.returncode:
        raise MachineError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


# ---------------------------------------------------------------- initial file system


def _archive(tree: Path, busybox: Path) -> bytes:
    """The cpio archive: busybox, the modules in order of loading, and init."""
    files: dict[str, tuple[int, bytes]] = {"init": (0o100755, INIT.read_bytes()), "bin/busybox": (0o100755, busybox.read_bytes())}
    order = []
    for name, content in _modules(tree):
        order.append(name)
        files[f"modules/{name}"] = (0o100644, content)
    files["modules/order"] = (0o100644, "\n".join(order).encode() + b"\n")
    folders = ["bin", "modules", "proc", "sys", "dev", "low", "rw", "new"]
    entries = [(name, 0o040755, b"") for name in folders] + [(name, mode, content) for name, (mode, content) in files.items()]
    packed = [_entry(number, *entry) for number, entry in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1)]
    return b"".join(packed)


def _entry(inode: int, name: str, mode: int, content: bytes) -> bytes:
    """One file in cpio's "new ASCII" format: a header of 8-digit hexadecimal fields, name and content padded to 4 bytes."""
    path = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + path
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def _modules(tree: Path) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of MODULES and all they depend on, dependencies first. What is built into the kernel has no file."""
    files = {_module_name(path): path for path in tree.glob("lib/modules/*/kernel/**/*.ko*")}
    done: set[str] = set()

    def add(name: str) -> Iterator[tuple[str, bytes]]:
        if name in done or name not in files:
            return
        done.add(name)
        content = _plain(files[name])
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in filter(None, (depends[1] if depends else b"").decode().split(",")):
            yield from add(other.replace("-", "_"))
        yield f"{name}.ko", content

    for name in MODULES:
        yield from add(name)


def _module_name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _plain(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix != ".ko":
        raise MachineError(f"{path.name}: modules packed like this can't be unpacked here; use another kernel package")
    return path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.rename(path)
