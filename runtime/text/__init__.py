"""Text in and out of a model: tokenizer, chat template, incremental detokenizer, stop strings."""

from inferencex.runtime.text.chat import ChatTemplate
from inferencex.runtime.text.detokenizer import IncrementalDetokenizer
from inferencex.runtime.text.stop import StopMatcher
from inferencex.runtime.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "Tokenizer"]
