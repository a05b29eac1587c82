from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server import filters
from inferencex.runtime.server.calls import Call, Caller
from inferencex.runtime.server.errors import Failed, InvalidRequest
from inferencex.runtime.server.filters import FilterContext, Filters, load_filters

CALL = Call("m", "text", SamplingParams(), "id-1", "chat")
CALLER = Caller("alice")


class Plain:
    """Refuses a word, on whatever thread it is called."""

    def __init__(self, word: str = "bad") -> None:
        self.word = word
        self.seen: list[tuple[str, FilterContext, int]] = []

    def check_input(self, text: str, context: FilterContext) -> str | None:
        self.seen.append((text, context, threading.get_ident()))
        return f"{self.word} is a word" if self.word in text else None


class Asynchronous:
    async def check_output(self, text: str, context: FilterContext) -> str | None:
        await asyncio.sleep(0)
        return "too long" if len(text) > 5 or context.finished else None


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_no_filter_checks_nothing() -> None:
    none = Filters()
    assert not none.checks_input and not none.checks_output
    run(none.check_input(CALL, CALLER, "anything"))


def test_a_plain_filter_runs_beside_the_event_loop_and_knows_the_request() -> None:
    plain = Plain()
    chain = Filters([plain])
    assert chain.checks_input and not chain.checks_output
    run(chain.check_input(CALL, CALLER, "good"))
    (text, context, thread), *_ = plain.seen
    assert text == "good" and context == FilterContext("alice", "chat", "m", "id-1", False)
    assert thread != threading.get_ident()


def test_a_refusal_is_an_invalid_request_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="the prompt was refused: bad is a word") as caught:
        run(Filters([Plain("x"), Plain()]).check_input(CALL, CALLER, "a bad word"))
    assert (caught.value.status, caught.value.code) == (400, "content_filter")


def test_an_asynchronous_filter_sees_the_text_so_far() -> None:
    chain = Filters([Asynchronous()])
    run(chain.check_output(CALL, CALLER, "short", False))
    for text, finished in (("longer", False), ("short", True)):
        with pytest.raises(InvalidRequest, match="the answer was refused: too long"):
            run(chain.check_output(CALL, CALLER, text, finished))


@pytest.mark.parametrize("result", [ValueError("boom"), KeyError("x"), 5, True])
def test_a_filter_that_fails_is_an_error_of_the_server(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def check_input(self, text: str, context: FilterContext) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

    with caplog.at_level(logging.ERROR), pytest.raises(Failed) as caught:
        run(Filters([Broken()]).check_input(CALL, CALLER, "text"))
    assert caught.value.status == 500 and caught.value.code == "filter_failed"
    assert "boom" not in str(caught.value)
    assert "id-1" in caplog.text and "Broken" in caplog.text


def test_filters_are_loaded_by_module_and_object() -> None:
    loaded = load_filters([f"{__name__}:Plain"] if ":" not in __name__ else [])
    assert loaded.checks_input


def test_filters_are_loaded_by_the_name_of_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("decency", "collections:OrderedDict", filters.GROUP)
    monkeypatch.setattr(filters, "entry_points", lambda group: EntryPoints([entry]))
    with pytest.raises(OptionError, match="OrderedDict has neither a method check_input nor check_output"):
        load_filters(["decency"])
    with pytest.raises(OptionError, match="there is no filter 'decent'; installed are: decency"):
        load_filters(["decent"])


@pytest.mark.parametrize("name", ["no_such_module:X", "json:NoSuchObject", "json:decoder.Missing", "absent"])
def test_what_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(OptionError, match=name.split(":")[0]):
        load_filters([name])
