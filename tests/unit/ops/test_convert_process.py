"""Conversions as processes: interrupted ones leave nothing behind, killed ones not for long; memory does not grow with the model."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ops.container import Container, ContainerError, ContainerWriter
from ops.convert import convert
from ops.temporaries import create_locked, remove_stale, temporary_name
from tests.unit.ops.checkpoints import Small, write_folder

# Converts argv[1] to argv[2]; says when a tensor is written and waits there for the parent.
WAITING = """
import sys
from ops.convert import convert

def progress(done, total, name):
    print(done, flush=True)
    sys.stdin.read(1)

convert(sys.argv[1], sys.argv[2], progress=progress)
"""

# Prints how much the peak memory grew during a conversion, in bytes.
MEASURING = """
import resource, sys
from ops.convert import convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
convert(sys.argv[1], sys.argv[2], quant="int8")
print(peak() - before)
"""


@pytest.fixture(autouse=True)
def nothing_ignored() -> Iterator[None]:
    """Under nohup or in the background of a script some signals are ignored, by children too."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@contextmanager
def conversion(source: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion that has written its first tensor and waits for a character on its standard input before it goes on."""
    command = [sys.executable, "-c", WAITING, str(source), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_interrupted_conversion_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    source = write_folder(tmp_path / "src", Small())
    folder = tmp_path / "out"
    folder.mkdir()
    with conversion(source, folder / "m.colibri") as process:
        assert len(list(folder.iterdir())) == 1, "the temporary file lies beside the target"
        process.send_signal(number)
        assert process.wait(timeout=30) != 0
    assert list(folder.iterdir()) == []


def killed_midway(source: Path, out: Path) -> None:
    """Leaves the temporary file of a conversion."""
    with conversion(source, out) as process:
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path) -> None:
    source, folder = write_folder(tmp_path / "src", Small()), tmp_path / "out"
    folder.mkdir()
    killed_midway(source, folder / "m[1].colibri")
    killed_midway(source, folder / "other.colibri")
    (stale,) = folder.glob(".m*")
    (others,) = folder.glob(".other*")
    mine = folder / ".m[1].colibri.notes.tmp"
    mine.write_text("not a converter's")
    convert(source, folder / "m[1].colibri")
    assert set(folder.iterdir()) == {folder / "m[1].colibri", others, mine}
    assert not stale.exists()


def test_a_failing_conversion_removes_it_too(tmp_path: Path) -> None:
    """What it left may be why the disk is too full."""
    source, folder = write_folder(tmp_path / "src", Small()), tmp_path / "out"
    folder.mkdir()
    killed_midway(source, folder / "m.colibri")
    with (
        pytest.raises(ContainerError, match="free"),
        ContainerWriter(folder / "m.colibri", {"arch": {"layers": 1, "experts": 1}}, needed_bytes=1 << 60),
    ):
        pass
    assert list(folder.iterdir()) == []


def test_a_conversion_under_way_keeps_its_file(tmp_path: Path) -> None:
    source, folder = write_folder(tmp_path / "src", Small()), tmp_path / "out"
    folder.mkdir()
    with conversion(source, folder / "m.colibri") as process:
        (living,) = folder.iterdir()
        convert(source, folder / "m.colibri", quant="f32")
        assert set(folder.iterdir()) == {folder / "m.colibri", living}
        process.communicate("\n" * 1000, timeout=60)
        assert process.returncode == 0
    assert list(folder.iterdir()) == [folder / "m.colibri"]
    with Container.open(folder / "m.colibri") as container:
        assert container.descriptor["quant"] == "int8", "the later one to finish wins"


def test_a_file_removed_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real, removed = tmp_path / "m.colibri", fcntl.flock, []

    def late(fd: int, operation: int) -> None:
        if not removed and operation == fcntl.LOCK_EX:
            removed.append(fd)
            remove_stale(target)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    path = temporary_name(target)
    fd = create_locked(path)
    assert removed
    assert os.path.samestat(os.fstat(fd), path.stat())
    remove_stale(target)
    assert path.exists()
    os.close(fd)
    remove_stale(target)
    assert not path.exists()


def sparse_mixtral(folder: Path, small: Small) -> int:
    """A checkpoint of zeros in bf16 that takes no disk; returns its size."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small.config()))
    header, end = {}, 0
    width, kv = small.heads * small.head_dim, small.kv_heads * small.head_dim
    shapes = {"model.embed_tokens": (small.vocab, small.hidden), "lm_head": (small.vocab, small.hidden), "model.norm": (small.hidden,)}
    for layer in range(small.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm": (small.hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{role}_proj": (rows, small.hidden) for role, rows in (("q", width), ("k", kv), ("v", kv))}
        shapes |= {f"{prefix}self_attn.o_proj": (small.hidden, width), f"{prefix}block_sparse_moe.gate": (small.experts, small.hidden)}
        for expert in range(small.experts):
            experts = f"{prefix}block_sparse_moe.experts.{expert}."
            shapes |= {f"{experts}w1": (small.ffn, small.hidden), f"{experts}w3": (small.ffn, small.hidden)}
            shapes |= {f"{experts}w2": (small.hidden, small.ffn)}
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def test_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    small = Small(vocab=1000, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, experts=8, layers=12)
    size = sparse_mixtral(tmp_path / "src", small)
    command = [sys.executable, "-c", MEASURING, str(tmp_path / "src"), str(tmp_path / "out.colibri")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    expert = 4 * 3 * small.ffn * small.hidden
    # Two threads each hold an expert in f32, as read and packed; 40 MB for the threads' stacks and what the allocator keeps.
    bound = 2 * 2 * expert + 40_000_000
    assert bound < size / 2, "the model is too small to show anything"
    assert grown < bound, f"{grown / 1e6:.0f} MB more for a model of {size / 1e6:.0f} MB"
    with Container.open(tmp_path / "out.colibri") as container:
        assert not container.dequantise("layers.11.experts.7")[0].any()
