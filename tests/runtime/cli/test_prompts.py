from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_prompt_is_answered_on_standard_output_alone(run: Callable[..., Any], bundle: Path) -> None:
    result = run(bundle, "--prompt", "Grüße 😀")
    assert (result.status, result.out) == (0, "Grüße 😀\n")
    assert result.err.startswith("prefill ") and "decode " in result.err
    assert "first token after" in result.err and "KV blocks " in result.err and "tokens/s" in result.err
    assert run(bundle, "--prompt", "a", "--no-stats").err == ""


def test_the_system_prompt_and_the_template_are_used(run: Callable[..., Any], bundle: Path) -> None:
    result = run(bundle, "-p", "Hi", "--system", "Be kind.", "--special-tokens", "--no-stats")
    assert result.out == "<|system|>Be kind.<|user|>Hi<|assistant|>\n"
    for option in ("--raw", "--no-chat"):
        assert run(bundle, "-p", "Hi", option, "--special-tokens", "--no-stats").out == "Hi\n"


def test_without_a_chat_template_the_text_is_continued(run: Callable[..., Any], plain_bundle: Path) -> None:
    assert run(plain_bundle, "-p", "Once", "--special-tokens", "--no-stats").out == "Once\n"


def test_several_prompts_are_answered_in_order(run: Callable[..., Any], bundle: Path) -> None:
    assert run(bundle, "-p", "one", "-p", "two\nlines", "-p", "three", "--raw").out == "one\n\ntwo\nlines\n\nthree\n"
    assert run(bundle, "-p", "one", "--raw", "--n", 2, "--temperature", 1).out == "one\n\none\n"


def test_standard_input_is_the_prompt_when_it_is_no_terminal(run: Callable[..., Any], bundle: Path) -> None:
    assert run(bundle, "--raw", stdin="line\nänd another\n".encode()).out == "line\nänd another\n"
    for text, message in ((b"", "standard input is empty"), (b"\n", "is empty"), (b"\xff", "not UTF-8")):
        result = run(bundle, stdin=text)
        assert result.status == 1 and result.out == "" and message in result.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--max-tokens", 3], "abc\n"),
        (["--stop", "cd"], "ab\n"),
        (["--stop", "x", "--stop", "de", "--include-stop"], "abcde\n"),
        (["--stop-token-id", 67], "abc\n"),
        (["--logit-bias", "68=-100", "--logit-bias", "69=100", "--max-tokens", 5], None),
        (["--seed", 1, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 5, "--min-p", 0.1], "abcdef\n"),
        (["--ignore-eos", "--max-tokens", 7, "--special-tokens"], "abcdef<|end|>\n"),
        (["--min-tokens", 2, "--max-tokens", 2], "ab\n"),
        (["--repetition-penalty", 1.1, "--presence-penalty", 0.1, "--frequency-penalty", 0.1], "abcdef\n"),
    ],
)
def test_sampling_options_reach_the_sampler(
    run: Callable[..., Any], bundle: Path, options: list[object], expected: str | None
) -> None:
    result = run(bundle, "--raw", "-p", "abcdef", *options)
    assert result.status == 0, result.err
    assert result.out == expected if expected is not None else result.out != "abcde\n"


def test_engine_options_reach_the_engine(run: Callable[..., Any], bundle: Path) -> None:
    engine = ["--max-num-seqs", 2, "--max-num-batched-tokens", 4, "--kv-blocks", 7, "--no-prefix-caching"]
    engine += ["--threads", 1, "--scheduling-policy", "priority", "--max-model-len", 64]
    result = run(bundle, "--raw", "-p", "some text", *engine)
    assert result.out == "some text\n" and "of 7" in result.err
    result = run(bundle, "--raw", "-p", "x" * 80, *engine)
    assert result.status == 1 and result.out == "" and "64" in result.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--input", "in.jsonl"], 1, "--input and --output go together"),
        (["--output", "out.jsonl"], 1, "--input and --output go together"),
        (["--input", "a", "--output", "b", "--prompt", "x"], 1, "--prompt and --input are two sources"),
        (["--raw", "--system", "x", "-p", "y"], 1, "--system is part of a chat"),
        (["-p", "x", "--temperature", "-1"], 1, "temperature is -1"),
        (["-p", "x", "--temperature", "warm"], 2, "Invalid value for '--temperature'"),
        (["-p", "x", "--logit-bias", "7"], 1, "--logit-bias '7' is not ID=BIAS"),
        (["-p", "x", "--logprobs", "1"], 1, "--logprobs needs --input and --output"),
        (["-p", "x", "--scheduling-policy", "random"], 2, "Invalid value for '--scheduling-policy'"),
        (["--nonsense"], 2, "No such option: --nonsense"),
        (["-p", "x", "--max-model-len", "100000"], 1, "--max-model-len 100000 is"),
    ],
)
def test_wrong_use_is_one_line_on_standard_error(
    run: Callable[..., Any], bundle: Path, arguments: list[str], status: int, message: str
) -> None:
    result = run(bundle, *arguments)
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith("error: ") and message in result.err and result.err.count("\n") == 1


def test_a_system_prompt_needs_a_chat_template(run: Callable[..., Any], plain_bundle: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n')
    for arguments in (["-p", "x"], ["--input", source, "--output", target]):
        result = run(plain_bundle, *arguments, "--system", "S")
        assert (result.status, result.out) == (1, "")
        assert result.err == ("error: --system is part of a chat, and this bundle has no chat template; leave it out\n")
    assert not target.exists() or target.read_text() == ""


def test_a_missing_bundle_is_named(run: Callable[..., Any], tmp_path: Path) -> None:
    result = run(tmp_path / "absent", "-p", "x")
    assert result.status == 1 and "absent: is not a folder" in result.err and result.err.count("\n") == 1


def test_debug_shows_the_traceback(run: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run(bundle, "-p", "x" * 5000, "--debug").err
    assert "Traceback" not in run(bundle, "-p", "x" * 5000).err
    monkeypatch.setenv("INFERENCEX_DEBUG", "1")
    assert "Traceback" in run(bundle, "-p", "x" * 5000).err


def test_an_answer_in_a_narrow_encoding_is_escaped(program: list[str], bundle: Path) -> None:
    command = [*program, str(bundle), "--raw", "-p", "é😀", "--no-stats"]
    result = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, rb"\xe9\U0001f600" + b"\n", b"")


def test_ctrl_c_leaves_with_one_line(run: Callable[..., Any], bundle: Path) -> None:
    result = run(bundle, "--raw", "-p", "abc", "-p", "def", "--no-stats", stop_at=2)
    assert (result.status, result.out, result.err) == (130, "", "interrupted\n")


def test_a_reader_that_goes_away_is_no_error(program: list[str], bundle: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*program, str(bundle), "--raw", "-p", "abc", "--no-stats"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")
