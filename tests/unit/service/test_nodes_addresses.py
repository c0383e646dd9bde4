"""Where nodes are looked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.config import ConfigError, ServeConfig
from service.nodes.addresses import Place, file_of, parse_places, read_places, resolve
from service.nodes.link import Identity, Link
from service.nodes.pool import NodePool, PoolConfig


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "nodes.txt"
    assert (parse_places(f"file:{file}"), file_of(f"file:{file}")) == (((), False), str(file))
    file.write_text("a:1,[::1]:2\n")
    assert read_places(str(file)) == ((Place("a", 1), Place("::1", 2)), "")
    file.write_text("\na:1\n[::1]:2,\na:1\n")
    assert read_places(str(file)) == ((Place("a", 1), Place("::1", 2)), "")
    file.write_text("# of the lab: c:3\na:1 # the old one\n[::1]:2")
    assert read_places(str(file)) == ((Place("a", 1), Place("::1", 2)), "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "is empty"),
        ("a:1,b", "says 'b', which is no HOST:PORT"),
        ("file:b", "says 'file:b'"),
        ("a\x1b[2J:1", r"says 'a\x1b[2J:1'"),
        ("\xff", "is not plain text"),
        ("x" * 1000, f"says {'x' * 64!r},"),
        ("a:" + "1" * 5000, "says 'a:111"),
    ],
)
def test_a_file_without_a_list_is_named_with_the_remedy(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "nodes.txt"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    found, trouble = read_places(str(file))
    assert found == ()
    assert trouble.startswith(f"the list of nodes {file} {words}")
    assert trouble.endswith(": write HOST:PORT,HOST:PORT into it; it is read again and again")


@pytest.mark.parametrize("text", ["a:1 " * 1025, "a:1" + " " * 65536])
def test_a_list_without_end_is_not_read_to_its_end(tmp_path: Path, text: str) -> None:
    file = tmp_path / "nodes.txt"
    file.write_text(text)
    found, trouble = read_places(str(file))
    assert found == ()
    assert trouble == f"the list of nodes {file} is too long: at most 1024 addresses and 65536 characters are read; shorten it"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        assert read_places(str(path))[1].startswith(f"the list of nodes {path} cannot be read (it is no regular file)")


def test_a_list_that_vanishes_while_serving_is_told_once_and_its_nodes_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pool_of: Callable[[Path], NodePool]
) -> None:
    caplog.set_level(logging.INFO, "colibri.nodes")
    file = tmp_path / "nodes.txt"
    pool = pool_of(file)
    pool.look_up()
    assert f"nodes: {pool.unresolved}" in caplog.messages, "there is no list yet"
    file.write_text("127.0.0.1:1,127.0.0.1:2\n")
    pool.look_up()
    known = dict(pool.members)
    assert (sorted(map(str, known)), pool.notes) == (["127.0.0.1:1", "127.0.0.1:2"], [])
    file.unlink()
    for _ in range(3):
        pool.look_up()
    assert pool.members == known, "they are the same ones"
    assert caplog.messages.count(f"nodes: {pool.unresolved}; until then the 2 known are kept") == 1
    assert pool.notes == [pool.unresolved]
    file.write_text("127.0.0.1:1")
    pool.look_up()
    assert (list(map(str, pool.members)), pool.unresolved) == (["127.0.0.1:1"], "")
    assert caplog.messages.count("nodes: found again: 1 addresses") == 1


@pytest.fixture
def pool_of() -> Iterator[Callable[[Path], NodePool]]:
    """Makes pools that follow a file and look only when told to; nobody is at the addresses."""
    made: list[NodePool] = []

    def make(file: Path) -> NodePool:
        config = PoolConfig(
            places=(),
            by_name=False,
            file=str(file),
            identity=Identity("here", "model", "0" * 64, "0", "generic"),
            dial=lambda address, key: Link(address, None, key),
            why_no_tls=lambda address: "",
            experts=2,
            experts_of=(2,),
            timeout_s=1.0,
            resolve_s=1.0,
            replicas=1,
            redeal_s=1.0,
            slack=0.0,
        )
        made.append(NodePool(config))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_a_file_may_name_other_machines_so_it_needs_certificates_or_a_word() -> None:
    with pytest.raises(ConfigError, match="mutual TLS"):
        ServeConfig(nodes="file:nodes.txt")
    ServeConfig(nodes="file:nodes.txt", nodes_insecure=True)


def test_an_address_twice_is_one_node() -> None:
    assert parse_places("a:1, b:1,a:1") == ((Place("a", 1), Place("b", 1)), False)


def test_a_name_that_means_nothing_is_told() -> None:
    found, trouble = resolve((Place("nod.invalid", 50061), Place("127.0.0.1", 50061)), by_name=True)
    assert found == (Place("127.0.0.1", 50061),)
    assert trouble.startswith("the name nod.invalid does not resolve (")
    assert resolve((Place("127.0.0.1", 50061),), by_name=True)[1] == ""
