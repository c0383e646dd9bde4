"""How tests look at a conversion that must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops.convert import ConvertError, convert


def refused(source: Path, out: Path, **options: Any) -> str:
    """The one sentence a conversion fails with; nothing may be left of the output."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(ConvertError) as caught:
        convert(source, out, **options)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)
