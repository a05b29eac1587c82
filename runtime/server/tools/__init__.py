"""Tool calls in what a model writes: a parser for each way of writing them, chosen from the chat template's text."""

from inferencex.runtime.server.tools.base import CallArguments, CallBroken, CallStart, Event, Text, ToolParser
from inferencex.runtime.server.tools.choose import parser_class

__all__ = ["CallArguments", "CallBroken", "CallStart", "Event", "Text", "ToolParser", "parser_class"]
