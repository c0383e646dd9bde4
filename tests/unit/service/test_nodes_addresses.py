"""Where nodes are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config import ConfigError, ServeConfig
from service.nodes.addresses import Place, file_of, parse_places, read_places, resolve


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "nodes.txt"
    assert (parse_places(f"file:{file}"), file_of(f"file:{file}")) == (((), False), str(file))
    assert read_places(str(file)) == ()
    file.write_text("a:1,[::1]:2\n")
    assert read_places(str(file)) == (Place("a", 1), Place("::1", 2))
    for nothing in ("", "a", "file:b", "\xff"):
        file.write_text(nothing, encoding="latin-1")
        assert read_places(str(file)) == ()


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
