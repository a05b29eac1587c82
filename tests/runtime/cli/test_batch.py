from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect  # type: ignore[import-untyped]
import pytest

LINES: list[dict[str, Any]] = [
    {"prompt": "short"},
    {"id": "b", "prompt": "a longer prompt, so that answers end in another order than they began in"},
    {"id": 3, "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "ü😀"}]},
    {"id": None, "token_ids": [5, 6, 7]},
    {"prompt": "limited", "max_tokens": 2, "stop": ["zzz"]},
    {"prompt": "x" * 5000, "id": "too long"},
    {"messages": [{"role": "tool", "content": "1"}], "id": "refused by the template"},
    {"prompt": "stopped here and not there", "stop": " and", "logit_bias": {"70": 0.5}},
    {"prompt": "twice", "n": 2, "temperature": 1.0, "seed": 4},
    {"prompt": "lo", "logprobs": 1, "priority": -1},
]


def write_input(path: Path, lines: list[Any], blank: bool = True) -> Path:
    rows = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text(("\n\n" if blank else "\n").join(rows), encoding="utf-8")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def test_every_kind_of_line(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    result = run(bundle, "--input", source, "--output", target, "--raw", "--max-num-seqs", 3)
    assert result.status == 1 and result.out == ""
    assert "2 of 10 lines could not be answered" in result.err and "KV blocks" in result.err
    found = records(target)
    assert [record["line"] for record in found] == list(range(1, 20, 2))
    assert [record.get("id", "-") for record in found[:4]] == ["-", "b", 3, None]
    assert [record.get("text") for record in found[:3]] == ["short", LINES[1]["prompt"], "Sü😀"]
    assert found[0]["finish_reason"] == "stop" and found[0]["prompt_tokens"] == 5
    assert found[0]["completion_tokens"] == 6
    assert (found[4]["text"], found[4]["finish_reason"]) == ("li", "length")
    assert "5000" in found[5]["error"] and "text" not in found[5]
    assert "no tools here" in found[6]["error"]
    assert (found[7]["text"], found[7]["stop_reason"]) == ("stopped here", " and")
    assert [choice["text"] for choice in found[8]["choices"]] == ["twice", "twice"]
    assert [position[0]["token"] for position in found[9]["logprobs"]][:2] == ["l", "o"]
    assert found[9]["logprobs"][0][0]["logprob"] == pytest.approx(0.0, abs=1e-6)


def test_prompts_are_turns_of_a_chat_by_default(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", [{"prompt": "Hi"}]), tmp_path / "out.jsonl"
    options = ["--system", "S", "--special-tokens", "--no-stats"]
    result = run(bundle, "--input", source, "--output", target, *options)
    assert result.status == 0
    assert records(target)[0]["text"] == "<|system|>S<|user|>Hi<|assistant|>"


def test_a_system_prompt_begins_conversations_that_have_none(
    run: Callable[..., Any], bundle: Path, tmp_path: Path
) -> None:
    user = {"role": "user", "content": "Hi"}
    lines = [{"messages": [user]}, {"messages": [{"role": "system", "content": "own"}, user]}]
    source, target = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = run(bundle, "--input", source, "--output", target, "--system", "S", "--special-tokens", "--no-stats")
    assert result.status == 0
    assert [record["text"] for record in records(target)] == [
        "<|system|>S<|user|>Hi<|assistant|>",
        "<|system|>own<|user|>Hi<|assistant|>",
    ]


def test_messages_need_a_chat_template(run: Callable[..., Any], plain_bundle: Path, tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "x"}]}
    source, target = write_input(tmp_path / "in.jsonl", [line]), tmp_path / "out.jsonl"
    assert run(plain_bundle, "--input", source, "--output", target).status == 1
    assert "no chat template" in records(target)[0]["error"]


def test_a_run_cut_anywhere_is_continued_without_loss_or_repetition(
    run: Callable[..., Any], bundle: Path, tmp_path: Path
) -> None:
    lines = [{"id": index, "prompt": "line " * (index % 3) + "é"} for index in range(6)]
    source, target = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = [bundle, "--input", source, "--output", target, "--max-num-seqs", 2, "--no-stats"]
    assert run(*arguments).status == 0
    whole = target.read_bytes()
    for cut in range(0, len(whole) + 1, 7):
        target.write_bytes(whole[:cut])
        assert run(*arguments).status == 0
        assert target.read_bytes() == whole, f"cut at byte {cut}"
    before = target.stat().st_mtime_ns
    result = run(*arguments)
    assert "6 of 6 lines were answered by an earlier run" in result.err
    assert target.stat().st_mtime_ns == before


def test_a_killed_run_is_continued(program: list[str], bundle: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "word " * (1 + index % 4)} for index in range(12)]
    source, target = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [*program, str(bundle), "--input", str(source), "--output", str(target), "--max-num-seqs", "3"]
    killed = subprocess.run(command, env={**os.environ, "SCRIPTED_KILL_AT": "40"}, capture_output=True, timeout=60)
    assert killed.returncode == -9
    done = len(records(target))
    assert 0 < done < 12
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert resumed.returncode == 0 and f"{done} of 12 lines were answered by an earlier run" in resumed.stderr
    assert [record["line"] for record in records(target)] == list(range(1, 24, 2))
    assert "12 of 12 lines, " in resumed.stderr


def test_a_terminal_shows_a_bar(program: list[str], bundle: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [{"prompt": "a"}] * 5)
    arguments = [*program[1:], str(bundle), "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    child = pexpect.spawn(program[0], arguments, encoding="utf-8", timeout=30, env={**os.environ, "TERM": "xterm"})
    child.expect("5/5.*tokens/s")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "of 5 lines, " not in child.before


def test_ctrl_c_says_how_far_it_came(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a" * (5 * index + 1)} for index in range(4)]
    source, target = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = [bundle, "--raw", "--input", source, "--output", target, "--max-num-seqs", 1, "--no-stats"]
    result = run(*arguments, stop_at=5)
    assert result.status == 130
    assert "interrupted: 1 of 4 lines are answered; the same command goes on with the rest\n" in result.err
    assert run(*arguments).status == 0
    assert [len(record["text"]) for record in records(target)] == [1, 6, 11, 16]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON list, expected an object"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "exactly one of 'prompt', 'messages' and 'token_ids' is needed; found none"),
        ('{"prompt": "a", "token_ids": [1]}', "found 'prompt' and 'token_ids'"),
        ('{"prompt": 3}', "'prompt' is 3, expected a text"),
        ('{"token_ids": [1, "2"]}', "'token_ids' is"),
        ('{"token_ids": [true]}', "'token_ids' is"),
        ('{"messages": ["hi"]}', "'messages' is ['hi'], expected a list of objects"),
        ('{"prompt": "a", "tools": [{}]}', "'tools' go with 'messages'"),
        ('{"prompt": "a", "temprature": 1}', "'temprature' is no sampling parameter"),
        ('{"prompt": "a", "priority": "high"}', "'priority' is 'high', expected an integer"),
        ('{"prompt": "a", "temperature": -2}', "temperature is -2"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens is 'many'"),
    ],
)
def test_a_malformed_line_is_named_before_anything_runs(
    run: Callable[..., Any], bundle: Path, tmp_path: Path, line: str, message: str
) -> None:
    source, target = write_input(tmp_path / "in.jsonl", [{"prompt": "fine"}, line]), tmp_path / "out.jsonl"
    result = run(bundle, "--input", source, "--output", target, stop_at=1)
    assert result.status == 1 and result.err.count("\n") == 1
    assert f"{source}, line 3: " in result.err and message in result.err
    assert not target.exists()


def test_bytes_that_are_no_text_are_named(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    for number, data in (
        (2, b'{"prompt": "a"}\n{"prompt": "\xff"}\n'),
        (1, '{"prompt": "a"}\n'.encode("utf-16")),
        (1, '{"prompt": "a"}\n'.encode("utf-32-le")),
    ):
        source.write_bytes(data)
        result = run(bundle, "--input", source, "--output", tmp_path / "out.jsonl")
        assert result.status == 1 and f"line {number}: is not JSON" in result.err
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert run(bundle, "--input", source, "--output", tmp_path / "out.jsonl", "--raw").status == 0


def test_an_output_of_something_else_is_left_alone(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    arguments = [bundle, "--input", source, "--output", target, "--no-stats"]
    for content, message in (
        ("my notes\n", "line 1: is no record of a batch run; move it away"),
        ('{"text": "x"}\n', "line 1: is no record"),
        ('[{"line": 1}]\n', "line 1: is no record"),
        ('{"line": 1, "input_sha256": "0000"}\n', "answers line 1 of another input"),
    ):
        target.write_text(content)
        result = run(*arguments)
        assert result.status == 1 and message in result.err
        assert target.read_text() == content
    target.unlink()
    assert run(*arguments).status == 0
    write_input(source, LINES[:1])
    result = run(*arguments)
    assert result.status == 1 and "more records than the input has lines" in result.err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("--temperature", "0.5")),
        ((), ("--raw",)),
        (("--system", "S"), ("--system", "T")),
        (("--logit-bias", "5=1"), ("--logit-bias", "5=2")),
        ((), ("--max-model-len", "99")),
    ],
)
def test_a_run_is_not_continued_with_other_settings(
    run: Callable[..., Any], bundle: Path, tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    source, target = write_input(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    arguments = [bundle, "--input", source, "--output", target, "--no-stats"]
    assert run(*arguments, *before).status == 0
    content = target.read_bytes()
    result = run(*arguments, *after)
    assert result.status == 1 and result.err.count("\n") == 1
    assert "line 1: was answered with other settings (sampling options," in result.err
    assert "another --output" in result.err and target.read_bytes() == content
    assert run(*arguments, *before).status == 0
    assert run(*arguments, *before, "--max-num-seqs", 2, "--threads", 1).status == 0


def test_a_run_is_not_continued_with_another_bundle(
    run: Callable[..., Any], bundle: Path, plain_bundle: Path, tmp_path: Path
) -> None:
    source, target = write_input(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    moved, other = tmp_path / "moved", tmp_path / "other"
    for folder in (moved, other):
        shutil.copytree(bundle, folder)
    (other / "bundle.json").write_text('{"other": 1}')
    arguments = ["--input", source, "--output", target, "--no-stats"]
    assert run(bundle, *arguments).status == 0
    assert run(moved, *arguments).status == 0
    result = run(other, *arguments)
    assert result.status == 1 and "was answered with another bundle; continue" in result.err
    (other / "bundle.json").unlink()
    assert "bundle.json: cannot be read" in run(other, *arguments).err


def test_without_a_tokenizer_token_ids_are_answered(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 256}))
    lines = [
        {"token_ids": [5, 6, 7]},
        {"token_ids": [5, 6], "logprobs": 0},
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"token_ids": [5], "stop": "x"},
    ]
    source, target = write_input(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(folder, "--input", source, "--output", target).status == 1
    found = records(target)
    assert (found[0]["text"], found[0]["token_ids"], found[0]["finish_reason"]) == ("", [5, 6, 7, 256], "stop")
    assert found[1]["token_ids"] == [5, 6, 256] and len(found[1]["logprobs"]) == 3
    assert all("has no tokenizer" in record["error"] for record in found[2:])
    result = run(folder, "--prompt", "a")
    assert result.status == 1 and "has no tokenizer" in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--kv-blocks", 0), ("--kv-blocks", 10**9), ("--max-model-len", 5000), ("--max-num-seqs", 0), ("--threads", 5000)],
)
def test_engine_options_are_named_as_flags(run: Callable[..., Any], bundle: Path, option: str, value: int) -> None:
    result = run(bundle, "--prompt", "a", option, value)
    assert result.status == 1 and f"{option} {value}" in result.err


def test_lines_added_to_the_input_are_answered(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", LINES[:2]), tmp_path / "out.jsonl"
    arguments = [bundle, "--raw", "--input", source, "--output", target, "--no-stats"]
    run(*arguments)
    write_input(source, LINES[:3])
    assert run(*arguments).status == 0
    assert [record["text"] for record in records(target)] == ["short", LINES[1]["prompt"], "Sü😀"]


def test_files_that_cannot_be_used_are_named(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", LINES[:1])
    empty = write_input(tmp_path / "empty.jsonl", [""])
    for input, output, message in (
        (tmp_path / "absent.jsonl", tmp_path / "out", "absent.jsonl: cannot be read"),
        (source, tmp_path / "no" / "out", "cannot be written"),
        (source, source, "--input and --output are both"),
        (tmp_path, tmp_path / "out", "is no regular file"),
        (empty, tmp_path / "out", "has no lines to answer"),
    ):
        result = run(bundle, "--input", input, "--output", output)
        assert result.status == 1 and message in result.err and result.err.count("\n") == 1


def test_lone_surrogates_are_answered_with_an_error(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = (
        write_input(tmp_path / "in.jsonl", [r'{"id": "\ud800", "prompt": "\ud800"}']),
        tmp_path / "out.jsonl",
    )
    assert run(bundle, "--input", source, "--output", target).status == 1
    assert records(target)[0]["id"] == "\ud800" and "lone surrogate" in records(target)[0]["error"]


def test_two_runs_do_not_share_an_output(run: Callable[..., Any], bundle: Path, tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", LINES[:1]), tmp_path / "out.jsonl"
    with target.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = run(bundle, "--input", source, "--output", target)
        assert result.status == 1 and "another run is writing it" in result.err
    assert run(bundle, "--input", source, "--output", target).status == 0
