"""Entry point of a worker process: runs lanes in threads until they are asked to leave or the front end is gone.

Started as `python -I -S worker_main.py --path ... --control FD --model-table FD --team FD --arena FD --lanes 0,1 ...`. It
imports the standard library but dataclasses, cffi's backend, of the engine what lanes need, and small modules beside it: a start takes
about 20 ms of a CPU.

The control socket, one end of a pair, carries from the supervisor one byte ("your lanes are bound, go"), then records with a descriptor
each: bytes of the model that are to be mapped from there (workers.parts). The worker answers in lines of JSON: ready and what could not be
had (pinning, memory policy), or why it can't work; then each time how many records it has followed. Its end of file means that the front
end is gone.

Before its lanes start it gives up all that computing does not need (workers.sandbox); of its descriptors it keeps the first three and the
control socket.
"""

from __future__ import annotations

import os
import sys

EXIT_MISMATCH = 3
"""The segments or the model do not fit this build: another start can't help."""
EXIT_LANE = 4
"""A lane returned with an error."""
EXIT_ORPHAN = 5
"""The front end went away."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38
OOM_POINTS = 200
"""Of a thousand: how much rather than its front end the kernel kills a worker when memory runs out."""


def parse(argv: list[str]) -> dict[str, str]:
    """--name value pairs."""
    return {name.removeprefix("--"): value for name, value in zip(argv[::2], argv[1::2], strict=True)}


def numbers(text: str) -> list[int]:
    """"1,2" -> [1, 2]; "" -> []."""
    return [int(part) for part in text.split(",") if part]


def restrict(parent: int, name: str) -> None:
    """No new privileges; SIGKILL with the parent (also when stopped, which the control socket can't see); a name for ps and top."""
    import ctypes
    import signal

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(EXIT_ORPHAN)


def main(argv: list[str]) -> None:
    """Never returns."""
    options = parse(argv)
    sys.path += options["path"].split(os.pathsep)
    control = int(options["control"])
    restrict(int(options["parent"]), options["name"])
    lanes, cpus, node_cpus = numbers(options["lanes"]), numbers(options["cpus"]), numbers(options["node-cpus"])

    import _socket
    import json
    import threading

    from engine_c.basics import EngineError
    from engine_c.lanes import Worker
    from engine_c.model import Model
    from workers.numa import prefer_memory, run_on
    from workers.parts import PART_RECORD, read_record, read_table

    degraded = [run_on(node_cpus)] if node_cpus else []
    degraded += [prefer_memory(node) for node in numbers(options["memory-node"])]

    from workers.sandbox import close_all_but, dump_no_shared_memory, lock_down, prefer_death

    degraded.append(prefer_death(OOM_POINTS))
    dump_no_shared_memory()

    def say(**message: object) -> None:
        os.write(control, json.dumps(message).encode() + b"\n")

    try:
        model = Model.open_parts(read_table(int(options["model-table"])))
        worker = Worker(model, int(options["team"]), int(options["arena"]))
    except EngineError as refusal:
        say(error=str(refusal))
        os._exit(EXIT_MISMATCH if refusal.name in ("EFORMAT", "EUNSUPPORTED") else EXIT_LANE)
    if os.read(control, 1) != b"g":
        os._exit(EXIT_ORPHAN)

    close_all_but((0, 1, 2, control))
    degraded += lock_down()
    left = len(lanes)
    lock = threading.Lock()

    def run(i: int) -> None:
        nonlocal left
        refused = run_on([cpus[i]]) if cpus else ""
        if refused:
            print(f"lane {lanes[i]}: not pinned: {refused}", file=sys.stderr, flush=True)
        try:
            worker.run(lanes[i])
        except EngineError as refusal:
            print(f"lane {lanes[i]}: {refusal}", file=sys.stderr, flush=True)
            os._exit(EXIT_LANE)
        with lock:
            left -= 1
            if left == 0:
                os._exit(0)

    for i in range(len(lanes)):
        threading.Thread(target=run, args=(i,), daemon=True).start()
    say(ready=True, degraded=[text for text in degraded if text])
    inbox, taken = _socket.socket(fileno=control), 0
    room = _socket.CMSG_SPACE(4)
    while True:
        data, extra, _, _ = inbox.recvmsg(PART_RECORD.size, room)
        if not data:
            os._exit(EXIT_ORPHAN)
        taken += 1
        part = read_record(data, b"".join(words for level, kind, words in extra if kind == _socket.SCM_RIGHTS))
        try:
            model.remap(part)
            say(mapped=taken)
        except EngineError as refusal:
            say(mapped=taken, unmapped=str(refusal))
        os.close(part.fd)


if __name__ == "__main__":
    main(sys.argv[1:])
