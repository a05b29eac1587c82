"""`inferencex-run`: prompts, chats and files of prompts, answered by a bundle."""

from inferencex.runtime.cli.command import app, main

__all__ = ["app", "main"]
