"""Messages that nobody would write: each is answered, none makes the server fail."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencex.runtime import LLM
from inferencex.runtime.server.openai.protocol.chat import ChatRequest
from inferencex.runtime.server.openai.protocol.completions import CompletionRequest
from tests.runtime.server.websocket.client import Scene, converse

FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "absent", "type", "key"})
NUMBERS = (
    st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)
PROMPTS = st.sampled_from(["x", ["x", "y"], [1, 2], [[1], [2]], [], [[]], [1, "x"], "", 7])
MESSAGES = st.sampled_from([[{"role": "user", "content": "x"}], [{"role": "user"}], [{}], [], "x", [[]]])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    kind=st.sampled_from(["generate", "chat"]),
    prompt=PROMPTS,
    messages=MESSAGES,
)
def test_no_message_makes_the_server_fail(llm: LLM, fields: Any, kind: str, prompt: Any, messages: Any) -> None:
    asked = {"prompt": prompt} if kind == "generate" else {"messages": messages}

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.send(text=json.dumps({"max_tokens": 4, **asked, **fields, "type": kind, "id": "g"}))
            heard = [await socket.hear()]
            while heard[-1]["type"] not in ("done", "error"):
                heard.append(await socket.hear())
            if heard[-1]["type"] == "error":
                assert heard[-1]["error"]["type"] in ("invalid_request_error", "not_found_error"), heard[-1]
            socket.say(type="ping", id="still here")
            assert (await socket.hear())["type"] == "pong"

    converse(llm, scenario)
