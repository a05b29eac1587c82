"""Grammars to constraints for one model's tokenizer, each compiled once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime.aside import Once
from inferencex.runtime.engine.constraint import ConstraintFactory, mask_width
from inferencex.runtime.structured.grammar import Grammar, JsonSchema, with_bounded_whitespace
from inferencex.runtime.structured.matcher import GrammarConstraintFactory
from inferencex.runtime.structured.schema_errors import in_words
from inferencex.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CACHED_GRAMMARS = 256
MAX_CHARACTERS = 1 << 18  # of a grammar; one of this size may take ten seconds to compile, and 50 MB
_CACHED_CHARACTERS = 1 << 20  # of all that are remembered, so that they take no more than some hundred MB


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and remembers the last ones. May be used by several threads.

    llguidance, and its form of the tokenizer, are loaded when the first grammar is compiled.

    vocab_size:    of the model's logits; more than the tokenizer has, often
    eos_token_ids: tokens that end an output
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        cached_grammars: int = CACHED_GRAMMARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(i for i in eos_token_ids if i < vocab_size)
        self._cached_grammars = cached_grammars
        self._loaded = Once(self._load)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._factories: OrderedDict[Grammar, ConstraintFactory] = OrderedDict()
        self._num_characters = 0  # of the grammars that are remembered

    def known(self, grammar: Grammar) -> ConstraintFactory | None:
        """Return what `compile` does for a grammar that it remembers, without waiting; None for others."""
        with self._lock:
            found = self._factories.get(grammar)
            if found is not None:
                self._factories.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar) -> ConstraintFactory:
        """Return what makes constraints of a grammar.

        Raises RequestError, with the place where there is one, for a grammar that says what cannot be followed, for one
        of more than `MAX_CHARACTERS`, and where the model has no tokenizer; BackendError where llguidance is not
        installed.
        """
        if not isinstance(grammar, Grammar):
            raise RequestError(f"the grammar is {grammar!r:.60}; expected a Grammar, such as Grammar.json_schema(...)")
        if len(grammar.text) > MAX_CHARACTERS:
            raise RequestError(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_CHARACTERS} can be followed"
            )
        found = self.known(grammar)
        if found is not None:
            return found
        made = self._compile(grammar)
        with self._lock:
            if grammar not in self._factories:
                self._num_characters += len(grammar.text)
            self._factories[grammar] = made
            while len(self._factories) > self._cached_grammars or self._num_characters > _CACHED_CHARACTERS:
                dropped, _ = self._factories.popitem(last=False)
                self._num_characters -= len(dropped.text)
        return made

    def load(self) -> None:
        """Get ready to compile, which takes a second for a large vocabulary, and happens by itself else.

        Raises what `compile` does for want of a tokenizer or of llguidance.
        """
        self._tokens()

    def _tokens(self) -> LLTokenizer:
        with self._loading:
            return self._loaded.result()

    def _compile(self, grammar: Grammar) -> ConstraintFactory:
        tokenizer, llguidance = self._tokens(), _llguidance()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(in_words(grammar, matcher.get_error(), _refusal))
        return GrammarConstraintFactory(matcher, mask_width(tokenizer.vocab_size))

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer, and the bundle has none")
        llguidance = _llguidance()
        try:
            tokenizer: LLTokenizer = llguidance.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._eos_token_ids or None,
            )
        except Exception as error:  # the library raises what it likes for tokenizers that it does not know
            raise BackendError(f"structured output does not work with this bundle's tokenizer: {error}") from error
        return tokenizer


def _source(grammar: Grammar) -> str:
    """Return a grammar as llguidance takes it. Raises RequestError for a schema that allows nothing."""
    llguidance = _llguidance()
    if grammar.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "choice":
        return str(llguidance.grammar_from("choice", grammar.text))
    return _schema_source(grammar.schema)


def _schema_source(schema: JsonSchema) -> str:
    if schema is False:
        raise RequestError("the JSON schema cannot be followed: at #: it allows nothing")
    return str(_llguidance().LLMatcher.grammar_from_json_schema(json.dumps(with_bounded_whitespace(schema))))


def _refusal(schema: Mapping[str, Any]) -> str:
    """Return what llguidance has against a schema."""
    limits = _llguidance().LLParserLimits(verbose_errors=False)
    message: str = _llguidance().LLMatcher.validate_grammar(_schema_source(schema), limits=limits)
    return "" if message.startswith("WARNING") else message


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise BackendError(
            "structured output needs the package llguidance, which is not installed; install inferencex[serve]"
        ) from error
    return llguidance
