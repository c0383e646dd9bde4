"""The C test programs, engine_c/tests/test_*.c: each is compiled with the library's sources and run.

A program that goes through the instruction sets itself (check_each_isa) runs once; any other once for each set this CPU has,
chosen by COLIBRI_ISA.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine_c"
BUILD = ROOT / "build" / "ctests"
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
FLAGS.append("-DCOLIBRI_GUARD")  # whatever allocates within a step aborts
INCLUDES = [f"-I{ENGINE / folder}" for folder in ("include", "src", "kernels")]
PROGRAMS = sorted((ENGINE / "tests").glob("test_*.c"))
ISAS = ("avx512", "avx2", "generic") if platform.machine() in ("x86_64", "AMD64") else ("neon", "generic")


def _cc(*arguments: str | Path) -> None:
    command = [os.environ.get("CC", "gcc"), *FLAGS, *INCLUDES, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def _object(source: Path) -> Path:
    out = BUILD / f"{source.parent.name}-{source.stem}.o"
    newest = max(path.stat().st_mtime for path in [source, *ENGINE.rglob("*.h")])
    if not out.exists() or out.stat().st_mtime <= newest:
        _cc("-c", source, "-o", out)
    return out


@pytest.fixture(scope="session")
def library() -> list[Path]:
    """Object files of the whole engine, compiled where older than a source."""
    BUILD.mkdir(parents=True, exist_ok=True)
    sources = [*sorted((ENGINE / "src").glob("*.c")), *sorted((ENGINE / "kernels").glob("*.c"))]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(_object, sources))


@pytest.fixture(scope="session")
def isas(library: list[Path]) -> frozenset[str]:
    """Instruction sets of this CPU."""
    shared = BUILD / "libcolibri-test.so"
    _cc("-shared", *library, "-lm", "-pthread", "-o", shared)
    available = ctypes.CDLL(str(shared)).colibri_isa_available
    available.restype = ctypes.c_char_p
    return frozenset(available().decode().split(","))


def _cases() -> list[object]:
    cases: list[object] = []
    for program in PROGRAMS:
        own_loop = "check_each_isa(" in program.read_text()
        cases += [pytest.param(program, isa, id=f"{program.stem}-{isa or 'each'}") for isa in (("",) if own_loop else ISAS)]
    return cases


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "isa"), _cases())
def test_c_program(program: Path, isa: str, library: list[Path], isas: frozenset[str]) -> None:
    if isa and isa not in isas:
        pytest.skip(f"this CPU cannot run {isa}; it has {', '.join(sorted(isas))}")
    binary = BUILD / program.stem
    _cc(_object(program), *library, "-lm", "-pthread", "-o", binary)
    environment = {**os.environ, "COLIBRI_ISA": isa}
    done = subprocess.run([binary], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=570)
    assert done.returncode == 0, f"{program.name} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_programs_are_found() -> None:
    assert len(PROGRAMS) >= 5
