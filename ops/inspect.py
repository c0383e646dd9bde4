"""`colibri inspect`: what a container holds, for people."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from ops.container import Container, Json, TensorEntry
from service.printable import counted

_SECTIONS = ("architecture", "router", "weights", "embedded", "generation", "provenance")


@dataclass(frozen=True, slots=True)
class Description:
    """A container in words and numbers: section -> label -> value. Prints itself with rich."""

    path: Path
    name: str
    sections: dict[str, dict[str, str]]

    def __rich__(self) -> RenderableType:
        tables = []
        for section in _SECTIONS:
            table = Table(title=section, title_justify="left", show_header=False, box=None, padding=(0, 2))
            table.add_column(style="dim", no_wrap=True)
            table.add_column()
            for label, value in self.sections[section].items():
                table.add_row(label, value)
            tables.append(table)
        return Group(f"[bold]{self.name}[/bold]  {self.path}", *tables)


def describe(path: str | os.PathLike[str]) -> Description:
    """Raises ContainerError for a file that is no whole container. Checksums are not read (ops.verify does)."""
    with Container.open(path) as container:
        descriptor = container.descriptor
        weights, parameters = _weights(container)
        sections = {
            "architecture": {**_flat(descriptor.get("arch")), "parameters": parameters},
            "router": _flat(descriptor.get("router")),
            "weights": weights,
            "embedded": {name: _size(blob.length) for name, blob in container.blobs.items()},
            "generation": _flat(descriptor.get("generation")),
            "provenance": _flat(descriptor.get("provenance")),
        }
        return Description(container.path, str(descriptor.get("name", "")), sections)


def _weights(container: Container) -> tuple[dict[str, str], str]:
    """Bytes by kind and format; and the number of parameters."""
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    parameters = 0
    for entry in container.tensors.values():
        key = (_kind(entry, tied="head" not in container.tensors), entry.format)
        sizes[key] += entry.length
        counts[key] += 1
        parameters += _parameters(entry)
    rows = {f"{kind}, {fmt}": f"{_size(sizes[kind, fmt])} in {counted(counts[kind, fmt], 'tensor')}" for kind, fmt in sizes}
    return {**rows, "file": _size(container.file_bytes), "asked for": str(container.descriptor.get("quant", ""))}, _count(parameters)


def _kind(entry: TensorEntry, *, tied: bool) -> str:
    if entry.layout == "expert":
        return "experts"
    if entry.name in ("embed", "head"):
        return "embedding and head" if tied else "embedding" if entry.name == "embed" else "head"
    return "router" if ".router" in entry.name else "norms and vectors" if entry.layout == "plain" else "attention"


def _parameters(entry: TensorEntry) -> int:
    count = 3 if entry.layout == "expert" else 1
    for dim in entry.shape:
        count *= dim
    return 0 if entry.name == "rope.inv_freq" else count


def _flat(value: Json, prefix: str = "") -> dict[str, str]:
    """A JSON object as labels and short texts, inner objects' labels joined by dots, empty values left out."""
    rows: dict[str, str] = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict):
                rows |= _flat(inner, f"{prefix}{key}.")
            elif inner not in (None, "", []):
                rows[prefix + key] = ", ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
    return rows


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1_000_000_000 else f"{number / 1e6:.1f} M" if number >= 1_000_000 else str(number)


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1_000_000_000 else f"{number / 1e6:.1f} MB" if number >= 1_000_000 else f"{number} bytes"
