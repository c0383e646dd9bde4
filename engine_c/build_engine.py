"""Builds the C engine as the extension module ``engine_c._engine``.

setup.py takes ``ffibuilder`` (cffi_modules=["engine_c/build_engine.py:ffibuilder"]); ``python engine_c/build_engine.py`` builds in place,
recompiling only what changed. Declarations come from colibri.h itself, so there is one source of truth for every struct.

COLIBRI_CFLAGS and COLIBRI_LDFLAGS are appended to the flags below, for instance ``-fsanitize=address``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cffi import FFI

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
HEADER = PACKAGE / "include" / "colibri.h"
MODULE = "engine_c._engine"

CFLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
LIBRARIES = ["m", "pthread"]
# cffi's generated glue is not ours to keep free of -Wextra's findings.
PREAMBLE = """
#pragma GCC diagnostic ignored "-Wcast-function-type"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wunused-function"
#include "colibri.h"

static int colibri_front_step(int tell, colibri_session *session, const colibri_batch *batch, colibri_row_result *results,
                              int32_t *seq_status, colibri_step_stats *stats, colibri_error *err) {
  colibri_session_tell(session, tell);
  return colibri_step(session, batch, results, seq_status, stats, err);
}
"""
# What the wrapper needs beside the library: called with the GIL released, as everything is.
FRONT_STEP = """
int colibri_front_step(int tell, colibri_session *session, const colibri_batch *batch, colibri_row_result *results, int32_t *seq_status,
                       colibri_step_stats *stats, colibri_error *err);
"""


def declarations(header: str) -> str:
    """The header as cffi reads it: integer #defines kept, every other preprocessor line and the C++ brackets dropped."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    integer = re.compile(r"#define\s+\w+\s+\d+\s*$")
    lines = [line for line in text.splitlines() if not line.startswith("#") or integer.match(line)]
    return "\n".join(lines).replace("COLIBRI_API ", "")


def sources() -> list[Path]:
    """Every C file of the library."""
    return sorted([*PACKAGE.glob("src/*.c"), *PACKAGE.glob("kernels/*.c")])


def extra_flags(variable: str) -> list[str]:
    """What the environment adds to the flags."""
    return shlex.split(os.environ.get(variable, ""))


def make_builder() -> FFI:
    """The cffi builder, with paths relative to the repository as setuptools wants them."""
    builder = FFI()
    builder.cdef(declarations(HEADER.read_text()) + FRONT_STEP)
    builder.set_source(
        MODULE,
        PREAMBLE,
        sources=[str(path.relative_to(ROOT)) for path in sources()],
        include_dirs=[str(path.relative_to(ROOT)) for path in (PACKAGE / "include", PACKAGE / "src", PACKAGE / "kernels")],
        depends=[str(path.relative_to(ROOT)) for path in headers()],
        libraries=LIBRARIES,
        extra_compile_args=[*CFLAGS, *extra_flags("COLIBRI_CFLAGS")],
        extra_link_args=extra_flags("COLIBRI_LDFLAGS"),
    )
    return builder


def headers() -> list[Path]:
    """What every object depends on."""
    return sorted([*PACKAGE.glob("include/*.h"), *PACKAGE.glob("src/*.h"), *PACKAGE.glob("kernels/*.h")])


def build_in_place() -> Path:
    """Compiles into build/engine/ and puts the module beside this file, replacing it at once. Returns its path."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*CFLAGS, "-fno-semantic-interposition", *extra_flags("COLIBRI_CFLAGS"), "-DPy_LIMITED_API=0x030b0000", "-pthread"]
    flags += [f"-I{path}" for path in (PACKAGE / "include", PACKAGE / "src", PACKAGE / "kernels", sysconfig.get_path("include"))]
    link = [*extra_flags("COLIBRI_LDFLAGS"), *(f"-l{name}" for name in LIBRARIES)]
    # One folder of objects per set of flags: a sanitizer build does not disturb the ordinary one.
    key = hashlib.sha256(repr((compiler, flags)).encode()).hexdigest()[:12]
    folder = ROOT / "build" / "engine" / key
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        glue = folder / "_engine.c"
        make_builder().emit_c_code(str(glue))
        newest_header = max(path.stat().st_mtime for path in headers())
        jobs = [(source, folder / (source.parent.name + "_" + source.stem + ".o")) for source in [glue, *sources()]]

        def compile_one(job: tuple[Path, Path]) -> None:
            source, target = job
            if target.exists() and target.stat().st_mtime > max(source.stat().st_mtime, newest_header):
                return
            subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(target)], check=True)

        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(compile_one, jobs))
        module = PACKAGE / "_engine.abi3.so"
        fresh = folder / "_engine.new.so"
        subprocess.run([*compiler, "-shared", "-pthread", *(str(target) for _, target in jobs), *link, "-o", str(fresh)], check=True)
        os.replace(fresh, module)
    return module


ffibuilder = make_builder()

if __name__ == "__main__":
    try:
        print(build_in_place())
    except subprocess.CalledProcessError as failure:
        sys.exit(f"build_engine: the compiler failed ({failure.returncode}): {shlex.join(failure.cmd)}")
