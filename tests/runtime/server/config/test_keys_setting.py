from __future__ import annotations

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.calls import CallerLimits
from inferencex.runtime.server.config.keys_setting import ApiKey, key_store


def key(text: str, **fields: object) -> ApiKey:
    return ApiKey.model_validate({"key": text, **fields})


def test_callers_have_what_their_keys_say() -> None:
    store = key_store(
        (key("key-number-one"), key("key-number-two", name="batch", priority=5, concurrent=2)), (key("administrator"),)
    )
    first = store.authenticate("Bearer key-number-one")
    second = store.authenticate("Bearer key-number-two")
    admin = store.authenticate("Bearer administrator")
    assert (first.name, first.is_admin, first.limits) == ("key-1", False, CallerLimits())
    assert (second.name, second.priority, second.limits.concurrent) == ("batch", 5, 2)
    assert admin.is_admin and admin.name == "admin-1"


def test_names_are_unique() -> None:
    with pytest.raises(OptionError, match="the name 'a' is taken"):
        key_store((key("key-number-one", name="a"), key("key-number-two", name="a")), ())
    with pytest.raises(OptionError, match="anonymous"):
        key_store((key("key-number-one", name="anonymous"),), ())
