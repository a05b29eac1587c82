"""From what a client sends to token ids: chat templates and tokenizers, long texts aside from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from inferencex.formats.errors import ContextLengthError, RequestError
from inferencex.runtime.llm import LLM
from inferencex.runtime.server.calls import Call, Chat

_LONG = 16_384  # characters; more takes milliseconds, for which nobody else should wait
_MESSAGE = 64  # characters that a message counts beside its text, for what a template does with it


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it. `text` is None for prompts that came as token ids."""

    text: str | None
    token_ids: Sequence[int]


async def read_prompt(llm: LLM, call: Call) -> Prompt:
    """Render and tokenize a call's prompt. Raises RequestError for what the model cannot read."""
    prompt = call.prompt
    if isinstance(prompt, str):
        return await _aside(len(prompt), llm, prompt, call.add_special_tokens)
    if isinstance(prompt, Chat):
        texts = sum(len(str(message.get("content", ""))) for message in prompt.messages)
        if texts + _MESSAGE * len(prompt.messages) + len(str(prompt.tools)) + len(str(prompt.variables)) > _LONG:
            return await asyncio.to_thread(_read_chat, llm, prompt)
        return _read_chat(llm, prompt)
    return Prompt(None, prompt)


def render_chat(llm: LLM, chat: Chat) -> str:
    """Return the text of a conversation as the model reads it."""
    llm.require_tokenizer()
    text = llm.chat_template.render(
        chat.messages,
        tools=chat.tools,
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
        template=chat.template,
        **chat.variables,
    )
    return _opened(text, chat) if chat.continue_final_message else text


async def _aside(size: int, llm: LLM, text: str, add_special_tokens: bool) -> Prompt:
    if size > _LONG:
        return await asyncio.to_thread(_encoded, llm, text, add_special_tokens)
    return _encoded(llm, text, add_special_tokens)


def _read_chat(llm: LLM, chat: Chat) -> Prompt:
    return _encoded(llm, render_chat(llm, chat), False)


def _encoded(llm: LLM, text: str, add_special_tokens: bool) -> Prompt:
    """Tokenize a text, unless it is too long for the model whatever its tokens are: that is said at once.

    The tokenizer's library keeps the interpreter from everybody else while it works, for seconds on megabytes.
    """
    tokenizer, most = llm.require_tokenizer(), llm.engine.limits.max_model_len
    fewest = tokenizer.fewest_tokens(text) if len(text) > _LONG else 0
    if fewest > most:
        raise ContextLengthError(
            f"the prompt of {len(text)} characters has at least {fewest} tokens, more than the context of {most}; "
            "shorten the prompt"
        )
    return Prompt(text, tokenizer.encode(text, add_special_tokens))


def _opened(text: str, chat: Chat) -> str:
    """Cut what the template writes behind the last message's content."""
    content = chat.messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise RequestError("continue_final_message needs a last message whose content is a text that is not empty")
    place = text.rfind(content.strip())
    if place < 0:
        raise RequestError("continue_final_message: the chat template changes the last message, so it cannot go on")
    return text[: place + len(content.strip())]
