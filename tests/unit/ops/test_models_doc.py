"""docs/models.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from ops.models_doc import document


def test_models_doc_is_current() -> None:
    written = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert written == document(), "run: python -m ops.models_doc > docs/models.md"
