"""A minute of the soak; `make soak SECONDS=1800` runs it for longer, COLIBRI_SOAK_SEED repeats a run."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fault.soak import soak, table

SECONDS = 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_call_fails_and_no_token_changes_whatever_happens_to_workers(tmp_path: Path) -> None:
    seed = int(os.environ.get("COLIBRI_SOAK_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    report = soak(SECONDS, seed=seed, folder=tmp_path)
    print(table(report))
    assert report.sound, table(report)
    assert all(row.events for row in report.rows), "every kind of fault came at least once"
