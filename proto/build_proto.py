"""Makes the Python package `colibri` (messages, services and their types) from the `.proto` files beside this script.

The generated code must run on protobuf 6 and 7 alike, since clients install us beside packages that pin either. protoc stamps its own
version into what it writes, and newer run times accept older code, not the other way round: hence the pinned grpcio-tools and the check.

    python proto/build_proto.py [OUT_DIR]
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, MethodDescriptorProto

BUILD_REQUIREMENT = "grpcio-tools>=1.72.1,<1.73"
NEWEST_GENCODE = (6, 30)
ROOT = Path(__file__).resolve().parent
_HEADER = "# Generated from the .proto files by proto/build_proto.py. Do not edit.\n"


class ProtoBuildError(RuntimeError):
    """The stubs could not be made; says what to do about it."""


def generate(out_dir: str | Path) -> list[Path]:
    """Writes the package `colibri` below `out_dir` and returns the files written."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        descriptors = Path(scratch) / "set.pb"
        _protoc(out, descriptors, sources)
        written = _write_grpc_types(out, descriptors.read_bytes(), set(sources))
    for source in sources:
        module = out / source.removesuffix(".proto")
        written += [module.with_name(module.name + suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]
        _check_gencode(module.with_name(module.name + "_pb2.py"))
        _allow_unset_bools(module.with_name(module.name + "_pb2.pyi"))
    return written + _write_packages(out, sources)


def _protoc(out: Path, descriptors: Path, sources: list[str]) -> None:
    try:
        from grpc_tools import protoc
    except ImportError as error:
        raise ProtoBuildError(f"grpc_tools is missing: install '{BUILD_REQUIREMENT}' (in an environment of its own)") from error
    well_known = resources.files("grpc_tools") / "_proto"
    targets = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--descriptor_set_out={descriptors}", *targets, *sources]
    if protoc.main(arguments) != 0:
        raise ProtoBuildError(f"protoc refused {', '.join(sources)}; its own message is above")


def _check_gencode(path: Path) -> None:
    found = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", path.read_text())
    if found is None or (int(found[1]), int(found[2])) > NEWEST_GENCODE:
        version = "unknown" if found is None else f"{found[1]}.{found[2]}"
        raise ProtoBuildError(f"{path.name} is for protobuf {version}, newer than 6.30: install '{BUILD_REQUIREMENT}'")


def _allow_unset_bools(path: Path) -> None:
    """protoc lets None stand for an unset field in its constructors' types, but for bools."""
    path.write_text(path.read_text().replace(": bool = ...", ": _Optional[bool] = ..."))


def _write_packages(out: Path, sources: list[str]) -> list[Path]:
    folders = {parent for source in sources for parent in Path(source).parents if parent != Path(".")}
    written = []
    for folder in sorted(folders):
        init = out / folder / "__init__.py"
        init.write_text(_HEADER)
        written.append(init)
        if len(folder.parts) == 1:
            (init.parent / "py.typed").write_text("")
            written.append(init.parent / "py.typed")
    return written


def _write_grpc_types(out: Path, descriptor_set: bytes, sources: set[str]) -> list[Path]:
    """protoc types the messages, not the services; the `_pb2_grpc.pyi` are ours."""
    from google.protobuf import descriptor_pb2

    written = []
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file:
        if file.name in sources and file.service:
            path = out / (file.name.removesuffix(".proto") + "_pb2_grpc.pyi")
            path.write_text(_grpc_types(file))
            written.append(path)
    return written


def _grpc_types(file: FileDescriptorProto) -> str:
    module = file.name.removesuffix(".proto").replace("/", ".") + "_pb2"
    package, _, name = module.rpartition(".")
    lines = [_HEADER + "from collections.abc import AsyncIterator, Awaitable", "", "import grpc", "import grpc.aio", ""]
    lines += [f"from {package} import {name} as pb", ""]
    for service in file.service:
        lines += [f"class {service.name}Stub:", "    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ..."]
        lines += [f"    {method.name}: {_callable_type(method)}" for method in service.method]
        lines += ["", f"class {service.name}Servicer:"]
        lines += [f"    {_handler_type(method)}" for method in service.method]
        parameters = f"servicer: {service.name}Servicer, server: grpc.Server | grpc.aio.Server"
        lines += ["", f"def add_{service.name}Servicer_to_server({parameters}) -> None: ...", ""]
    return "\n".join(lines) + "\n"


def _types(method: MethodDescriptorProto) -> tuple[str, str]:
    return "pb." + method.input_type.rpartition(".")[2], "pb." + method.output_type.rpartition(".")[2]


def _callable_type(method: MethodDescriptorProto) -> str:
    request, response = _types(method)
    sides = ["Stream" if streams else "Unary" for streams in (method.client_streaming, method.server_streaming)]
    return f"grpc.{sides[0]}{sides[1]}MultiCallable[{request}, {response}]"


def _handler_type(method: MethodDescriptorProto) -> str:
    request, response = _types(method)
    taken = f"AsyncIterator[{request}]" if method.client_streaming else request
    # A streaming handler may be a generator, or a coroutine that writes to its context.
    given = f"AsyncIterator[{response}] | Awaitable[None]" if method.server_streaming else f"Awaitable[{response}]"
    context = f"grpc.aio.ServicerContext[{request}, {response}]"
    return f"def {method.name}(self, request: {taken}, context: {context}) -> {given}: ..."


if __name__ == "__main__":
    try:
        for generated in generate(sys.argv[1] if len(sys.argv) > 1 else ROOT.parent):
            print(generated)
    except ProtoBuildError as error:
        sys.exit(f"build_proto: {error}")
