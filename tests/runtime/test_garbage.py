"""Automatic collection is off while it is paused, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from inferencex.runtime.garbage import collection_paused


@pytest.fixture(autouse=True)
def _on_again() -> Iterator[None]:
    gc.unfreeze()  # commands that earlier tests have run
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("was_on", [True, False])
def test_it_is_afterwards_as_it_was(was_on: bool) -> None:
    if not was_on:
        gc.disable()
    with pytest.raises(ValueError, match="within"), collection_paused():
        assert not gc.isenabled()
        raise ValueError("within")
    assert gc.isenabled() is was_on


def test_what_is_made_meanwhile_counts_as_old() -> None:
    gc.collect()
    with collection_paused():
        made = [[place] for place in range(50_000)]
    assert not gc.get_freeze_count()
    assert len(gc.get_objects(generation=0)) < len(made)
    assert any(item is made for item in gc.get_objects(generation=2))


def test_what_the_application_has_frozen_stays_frozen() -> None:
    ours = [object()]
    gc.freeze()
    with collection_paused():
        pass
    assert gc.get_freeze_count()
    assert not any(item is ours for item in gc.get_objects())
