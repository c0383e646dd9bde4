"""Build steps that pyproject.toml cannot state: the C engine (cffi) and the protobuf stubs.

Setuptools lists packages before it builds anything, so the stubs are brought up to date first, whatever the command is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def stubs_are_current() -> bool:
    """True if every .proto file has a younger stub."""
    generated = list((ROOT / "colibri").rglob("*_pb2.py"))
    sources = [*(ROOT / "proto").rglob("*.proto"), ROOT / "proto" / "build_proto.py"]
    return bool(generated) and min(f.stat().st_mtime for f in generated) >= max(f.stat().st_mtime for f in sources)


if not stubs_are_current():
    subprocess.run([sys.executable, str(ROOT / "proto" / "build_proto.py")], check=True, cwd=ROOT)

setup(
    packages=find_packages(include=["colibri*", "engine_c*", "ops*", "service*", "workers*"], exclude=["*.tests*"]),
    package_data={
        "engine_c": ["include/*.h", "*.pyi", "py.typed"],
        "colibri": ["**/*.pyi", "py.typed"],
        "ops": ["**/*.json", "tiny/tiny.colibri", "tiny/LICENCES.txt", "tiny/texts/*.txt"],
    },
    cffi_modules=["engine_c/build_engine.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
