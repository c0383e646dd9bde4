"""What the tests of Ray let agents run: listens on its port, as a node does, and says in a file that it began and that it ended well."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    """node_program.py PORT FOLDER"""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    ended: list[int] = []
    with socket.create_server(("127.0.0.1", port)) as listener:
        signal.signal(signal.SIGTERM, lambda number, _: (ended.append(number), listener.close()))
        (folder / f"began-{port}-{os.getpid()}").touch()
        try:
            while not ended:
                listener.accept()[0].close()
        except OSError:
            pass
    (folder / f"ended-{port}-{os.getpid()}").touch()


if __name__ == "__main__":
    main()
