"""Starting a process without waiting for it: what subprocess can't (colibri_spawn in colibri.h says why)."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from engine_c._engine import ffi, lib
from engine_c.library import fail


def spawn(argv: Sequence[str], *, stdin: int, output: int, keep: Collection[int] = ()) -> tuple[int, int]:
    """Starts the program argv[0] and returns (pid, pidfd) at once; both are the caller's to reap and close.

    stdin and output are descriptors, output for stdout and stderr; those in `keep` stay open under their numbers. EngineError EIO if the
    machine makes no more processes. A program that cannot be run exits with 127.
    """
    words = [ffi.new("char[]", os.fsencode(word)) for word in argv]
    pointers = ffi.new("char *[]", [*words, ffi.NULL])
    kept = ffi.new("int32_t[]", sorted(keep))
    wish = ffi.new("colibri_spawn_wish *", (pointers, stdin, output, kept, len(keep)))
    found = ffi.new("int[]", 2)
    err = ffi.new("colibri_error *")
    if lib.colibri_spawn(wish, found, found + 1, err):
        raise fail(err)
    return found[0], found[1]
