"""Slots are lent to one at a time, and a lost one is noticed."""

from __future__ import annotations

import pytest

from service.blocks import IntegrityError
from service.slots import NONE, Slots


def test_each_slot_is_lent_once_and_can_be_lent_again() -> None:
    slots = Slots(3)
    taken = [slots.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    slots.check_integrity(taken)
    with pytest.raises(IndexError):
        slots.take()
    slots.give(taken[1])
    assert slots.take() == taken[1]


def test_a_lost_or_shared_slot_is_noticed() -> None:
    slots = Slots(2)
    slot = slots.take()
    for held in ([], [slot, slot]):
        with pytest.raises(IntegrityError, match="slot"):
            slots.check_integrity(held)


def test_where_there_are_none_nobody_gets_one() -> None:
    slots = Slots(0)
    assert slots.take() == NONE
    slots.give(NONE)
    slots.check_integrity([])
