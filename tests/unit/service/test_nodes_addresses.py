"""Where nodes are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config import ConfigError, ServeConfig
from service.nodes.addresses import Place, file_of, parse_places, read_places


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
