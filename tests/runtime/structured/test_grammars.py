"""Grammars on their own: what they allow, byte by byte, and what is said of those that are refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs the extra inferencex[serve]")

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime.engine.constraint import TokenConstraint, allowed_tokens, mask_width
from inferencex.runtime.structured import Grammar, GrammarCompiler, embedded_json
from inferencex.runtime.text import Tokenizer

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
POINT = {"type": "object", "properties": {"x": DIGIT}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(text_bundle: Path) -> Tokenizer:
    return Tokenizer.load(text_bundle)


@pytest.fixture(scope="module", params=[0, 70], ids=["as large as the vocabulary", "padded"])
def compiler(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + request.param, tokenizer.eos_token_ids)


def mask_of(constraint: TokenConstraint, vocab_size: int) -> Any:
    mask = np.full(mask_width(vocab_size), -1, dtype=np.int32)
    assert constraint.fill_mask(mask)
    return allowed_tokens(mask, vocab_size)


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a text, token by token, is allowed, and complete at its end."""
    tokenizer, vocab_size = compiler._tokenizer, compiler._vocab_size
    assert tokenizer is not None
    constraint = compiler.compile(grammar)()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if constraint.finished or not mask_of(constraint, vocab_size)[token_id]:
            return False
        constraint.accept(token_id)
    return constraint.may_stop


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.json_object(), ["{}", '{"a": [1, {"b": null}]}', '{"é": "日本 🙂"}'], ["[]", "{", '{"a": }', " {}"]),
        (Grammar.json_schema(POINT), ['{"x": 3}', '{"x":3}', '{\n\t"x": 3\n}'], ["{}", '{"x": 10}', '{"y": 3}']),
        (Grammar.json_schema(True), ["1", '"a"', "[true]"], ["", "a"]),
        (Grammar.json_schema('{"type": "boolean"}'), ["true", "false"], ["True", "1"]),
        (Grammar.regex("[a-c]{2,3}"), ["ab", "abc"], ["a", "abcd", "xab"]),
        (Grammar.regex("^ab$"), ["ab"], ["abc", "^ab$"]),
        (Grammar.regex("naïve (🙂|日本)+"), ["naïve 🙂日本"], ["naïve "]),
        (Grammar.choice(["yes", "yes, please", "no"]), ["yes", "yes, please", "no"], ["ye", "yes,", "maybe"]),
        (Grammar.choice(['a "b"\n', "c\\d/", "日本"]), ['a "b"\n', "c\\d/", "日本"], ["a", "c\\\\d/"]),
        (Grammar.lark('start: "a" b*\nb: "b" | "c"'), ["a", "abcb"], ["b", "ad"]),
        (Grammar.lark(f"start: \"call \" args\nargs: {embedded_json(POINT)}"), ['call {"x": 1}'], ['call {"x": 11}']),
    ],
)  # fmt: skip
def test_what_grammars_allow(compiler: GrammarCompiler, grammar: Grammar, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(compiler, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    "grammar", [Grammar.json_object(), Grammar.json_schema({}), Grammar.lark(f"start: {embedded_json(True)}")]
)
def test_whitespace_in_json_is_bounded(compiler: GrammarCompiler, grammar: Grammar) -> None:
    for between, allowed in ((" ", True), ("\n" + 20 * " ", True), ("  ", False), ("\n" + 21 * " ", False)):
        assert accepts(compiler, grammar, '{"a":' + between + "1}") == allowed
    assert not accepts(compiler, grammar, "{\n\n}")


@pytest.mark.parametrize("guidance", [{"whitespace_flexible": False}, {"whitespace_pattern": ""}])
def test_a_schema_may_say_what_whitespace_it_allows(compiler: GrammarCompiler, guidance: dict[str, Any]) -> None:
    schema = {**POINT, "x-guidance": guidance}
    for grammar in (Grammar.json_schema(schema), Grammar.lark(f"start: {embedded_json(schema)}")):
        assert accepts(compiler, grammar, '{"x":1}') and not accepts(compiler, grammar, '{"x": 1}')


def test_nothing_follows_a_complete_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for grammar, text, ends in (
        (Grammar.json_schema(POINT), '{"x": 3}', True),
        (Grammar.regex("a+"), "aa", False),
        (Grammar.choice(["yes", "no"]), "yes", True),
    ):
        constraint = compiler.compile(grammar)()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            assert not constraint.finished
            constraint.accept(token_id)
        assert (constraint.may_stop, constraint.finished) == (True, ends)


def test_special_tokens_are_text_only_where_the_grammar_names_them(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    user = tokenizer.token_to_id("<|user|>")
    assert user is not None
    for grammar, allowed in ((Grammar.regex("(.|\n)*"), False), (Grammar.lark('start: <|user|> "a"'), True)):
        assert mask_of(compiler.compile(grammar)(), compiler._vocab_size)[user] == allowed


def test_padding_of_the_vocabulary_is_never_allowed(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    for grown in (1, 40, 1000):
        compiler = GrammarCompiler(tokenizer, size + grown, tokenizer.eos_token_ids)
        assert not mask_of(compiler.compile(Grammar.regex("(.|\n)*"))(), size + grown)[size:].any()


def test_a_vocabulary_smaller_than_the_tokenizers_will_do(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 64, tokenizer.eos_token_ids)
    assert mask_of(compiler.compile(Grammar.regex("(.|\n)*"))(), 64).any()


def test_continuations_do_not_share_their_place(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    make = compiler.compile(Grammar.choice(["ab", "cd"]))
    first, second = make(), make()
    first.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    second.accept(tokenizer.encode("c", add_special_tokens=False)[0])
    c, d = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "cd")
    assert mask_of(second, compiler._vocab_size)[d] and not mask_of(first, compiler._vocab_size)[d]
    assert mask_of(make(), compiler._vocab_size)[c]
    with pytest.raises(RequestError, match="cannot be followed any further"):
        second.accept(c)


def test_grammars_are_compiled_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, cached_grammars=2)
    schema = Grammar.json_schema(POINT)
    assert compiler.compile(schema) is compiler.compile(Grammar.json_schema(dict(POINT)))
    digits, letters = Grammar.regex("[0-9]"), Grammar.regex("[a-z]")
    kept = compiler.compile(digits)
    assert compiler.compile(schema) is compiler.compile(schema)
    assert compiler.compile(letters) and compiler.compile(digits) is not kept  # the least recently used went
    assert len({schema, Grammar.json_schema(POINT), digits}) == 2


def test_what_is_remembered_is_bounded_in_size(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferencex.runtime.structured.compiler._CACHED_CHARACTERS", 100)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    first, second, third = (Grammar.regex(letter * 45) for letter in "abc")
    for grammar in (first, second, first, third):
        assert compiler.known(grammar) is None or grammar is first
        made = compiler.compile(grammar)
        assert compiler.known(grammar) is made
    assert compiler.known(second) is None and compiler.known(first) is not None
    compiler.compile(Grammar.regex("d" * 200))
    assert [compiler.known(grammar) for grammar in (first, third)] == [None, None]


def test_a_grammar_of_any_length_is_not_even_tried(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="the grammar has 262145 characters; at most 262144 can be followed"):
        compiler.compile(Grammar.regex("a" * (1 << 18) + "b"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "at #/properties/a: not supported here: uniqueItems"),
        ({"properties": {"a/b": {"anyOf": [{}, {"not": {}}]}}}, "at #/properties/a~1b/anyOf/1: not supported"),
        ({"properties": {"a": {"format": "iri"}}}, "at #/properties/a: Unknown format: iri"),
        ({"items": {"$ref": "#/$defs/t"}, "$defs": {"t": {"contains": {}}}}, "at #/$defs/t: not supported"),
        ({"items": {"$ref": "#/$defs/t"}}, "at #/items: Pointer '/$defs/t' does not exist"),
        ({"$ref": "https://example.org/schema"}, "Default retriever does not fetch resources"),
        ({"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, "at #/properties/a: the regular expression"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "at #: Unsatisfiable schema"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "oneOf with alternatives that may overlap; use anyOf"),
        ({"type": "text"}, "at #: Invalid type: text"),
        (False, "at #: it allows nothing"),
    ],
)  # fmt: skip
def test_what_a_schema_says_in_vain_is_named_with_its_place(
    compiler: GrammarCompiler, schema: Any, message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.compile(Grammar.json_schema(schema))
    assert str(refused.value).startswith("the JSON schema cannot be followed: ")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_hostile_schema_is_not_searched_for_ever(compiler: GrammarCompiler) -> None:
    loop = {"$defs": {"t": {"$ref": "#/$defs/t"}}, "$ref": "#/$defs/t", "uniqueItems": True}
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}, "uniqueItems": True}
    for schema in (loop, wide):
        with pytest.raises(RequestError, match="at #"):
            compiler.compile(Grammar.json_schema({**schema, "contains": {}}))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("ab(c"), "the regular expression 'ab(c', at character 2: unclosed group"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.lark("start: b"), 'at 1(8): unknown name: "b"'),
        (Grammar.lark('a: "a"'), "no start rule found"),
        (Grammar.lark("start: <|other|>"), "unknown special token"),
    ],
)
def test_other_grammars_are_refused_in_one_line(compiler: GrammarCompiler, grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.compile(grammar)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("yaml"), "kind is 'yaml'; expected one of: json_object"),
        (lambda: Grammar("regex", ""), "needs a text, and it is empty"),
        (lambda: Grammar("lark", 3), "needs a text; 3 was given"),
        (lambda: Grammar.choice([]), "expected a list of texts"),
        (lambda: Grammar.choice("ab"), "expected a list of texts"),
        (lambda: Grammar.choice(["a", ""]), "expected a text that is not empty"),
        (lambda: Grammar.json_schema("{"), "is no JSON"),
        (lambda: Grammar.json_schema("[1]"), "expected an object"),
        (lambda: Grammar.json_schema([1]), "expected an object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "cannot be written as JSON"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "cannot be written as JSON"),
        (lambda: Grammar.regex("a").schema, "is no JSON schema"),
    ],
)
def test_what_is_no_grammar(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_what_is_missing_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="needs a tokenizer, and the bundle has none"):
        GrammarCompiler(None, 50, ()).compile(Grammar.json_object())
    with pytest.raises(RequestError, match="expected a Grammar"):
        GrammarCompiler(tokenizer, 50, ()).compile({"type": "object"})  # type: ignore[arg-type]
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ModuleNotFoundError("No module named 'llguidance'", name=name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendError, match=r"install inferencex\[serve\]"):
        GrammarCompiler(tokenizer, 50, ()).compile(Grammar.json_object())


def test_tokenizers_that_fall_back_to_bytes(shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "stories260k")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    constraint = compiler.compile(Grammar.json_object())()
    prefix, *token_ids = tokenizer.encode('{"né": "日本 🙂"}', add_special_tokens=False)
    assert tokenizer.id_to_token(prefix) == "▁" and not mask_of(constraint, tokenizer.vocab_size)[prefix]
    for token_id in token_ids:
        assert mask_of(constraint, tokenizer.vocab_size)[token_id]
        constraint.accept(token_id)
    assert constraint.finished
