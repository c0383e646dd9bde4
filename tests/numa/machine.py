"""Virtual machines with NUMA nodes: what they look like, and one that runs."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.numa.image import QEMU, MachineError, make_image

CONSOLE_LINES = 40
"""Of the console and the job's output, what an error shows."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A NUMA node: CPUs, and memory in MiB (0: none). Nodes without CPUs come last: the kernel counts them last."""

    cpus: int = 1
    memory: int = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to boot. Nodes 2i and 2i + 1 are near each other (distance 20), all others far (31). threads: SMT siblings of a core."""

    nodes: tuple[NodeShape, ...]
    threads: int = 1

    @property
    def cpus(self) -> int:
        """CPUs of all nodes."""
        return sum(node.cpus for node in self.nodes)


MACHINES = {
    "one-node": Machine((NodeShape(2, 1536),)),
    "two-nodes": Machine((NodeShape(2, 768), NodeShape(2, 768))),
    "four-nodes": Machine((NodeShape(2),) * 4),
    "node-without-memory": Machine((NodeShape(1, 768), NodeShape(1, 768), NodeShape(1, 0))),
    "node-without-cpus": Machine((NodeShape(1, 768), NodeShape(1, 768), NodeShape(0, 512))),
    "uneven": Machine((NodeShape(3, 768), NodeShape(1, 768))),
    "smt": Machine((NodeShape(2, 768), NodeShape(2, 768)), threads=2),
}


class Running:
    """A machine that boots and runs job/run.sh. Its /job is the folder `job`, its / the host's, where what it writes is lost."""

    def __init__(self, machine: Machine, job: Path, *, timeout: float) -> None:
        """Starts it; it is switched off by force `timeout` seconds later. MachineError if it can't be."""
        image = make_image()
        self.job = job
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        with (job / "qemu").open("wb") as out:
            command = [*_command(machine, job), "-kernel", str(image.kernel), "-initrd", str(image.initrd)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    @property
    def on(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def running(self) -> bool:
        """The same; MachineError once its time is over."""
        if self.on and time.monotonic() > self._end:
            self.close()
            raise MachineError(f"the virtual machine did not end within {self._timeout:.0f} s\n{self.story()}")
        return self.on

    def exit_code(self) -> int:
        """The job's exit code, of a machine that has ended. MachineError if it ended before the job did."""
        try:
            return int((self.job / "exit-code").read_text())
        except FileNotFoundError:
            code = self._process.poll()
            raise MachineError(f"the virtual machine ended before its job (qemu's exit code: {code})\n{self.story()}") from None

    def close(self) -> None:
        """Switches it off if it still runs."""
        if self.on:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def story(self) -> str:
        """The last lines of everything it said."""
        texts = []
        for name in ("qemu", "console", "output"):
            path = self.job / name
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            texts += [f"---- {name}", *lines[-CONSOLE_LINES:]]
        return "\n".join(texts)


def run(machine: Machine, script: str, job: Path, *, timeout: float = 300.0) -> int:
    """Runs a shell script in a machine and returns its exit code; what it printed is in job/output."""
    (job / "run.sh").write_text(script)
    with Running(machine, job, timeout=timeout) as running:
        while running.running():
            time.sleep(0.02)
        return running.exit_code()


def _command(machine: Machine, job: Path) -> list[str]:
    """qemu's. Always emulation, so that a machine is the same everywhere: AVX2 and FMA, no AVX-512. SMT siblings
    are seen by the kernel as Intel's."""
    share = "security_model=none,multidevs=remap"
    command = [QEMU, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,vendor=GenuineIntel"]
    command += ["-nodefaults", "-no-user-config", "-no-reboot"]
    command += ["-display", "none", "-monitor", "none", "-serial", f"file:{job / 'console'}"]
    command += ["-append", "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off tsc=reliable"]
    command += ["-virtfs", f"local,path=/,mount_tag=host,readonly=on,{share}", "-virtfs", f"local,path={job},mount_tag=job,{share}"]
    return command + _numa(machine)


def _numa(machine: Machine) -> list[str]:
    """Nodes, their memory and distances. Even nodes are a socket each; uneven ones have a socket for every core."""
    sizes = {node.cpus for node in machine.nodes if node.cpus}
    cores = max(sizes) // machine.threads if len(sizes) == 1 else 1
    memory = sum(node.memory for node in machine.nodes)
    sockets = machine.cpus // (cores * machine.threads)
    options = ["-smp", f"{machine.cpus},sockets={sockets},cores={cores},threads={machine.threads}", "-m", f"{memory}M"]
    cpu = 0
    for i, node in enumerate(machine.nodes):
        text = f"node,nodeid={i}"
        if node.memory:
            options += ["-object", f"memory-backend-ram,id=memory{i},size={node.memory}M"]
            text += f",memdev=memory{i}"
        if node.cpus:
            text += f",cpus={cpu}-{cpu + node.cpus - 1}"
            cpu += node.cpus
        options += ["-numa", text]
    pairs = [(i, j) for i in range(len(machine.nodes)) for j in range(len(machine.nodes)) if i != j]
    for i, j in pairs:
        options += ["-numa", f"dist,src={i},dst={j},val={20 if i ^ j == 1 else 31}"]
    return options
