"""Text in files: what is found, what it is read as, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from inferencex.convert.calibrate import local_text
from inferencex.convert.calibrate.documents import Reading
from inferencex.convert.calibrate.local_text import LocalText, is_local
from inferencex.formats.errors import OptionError


def _texts(name: str | Path, column: str | None = None) -> list[str]:
    return [d.text for d in LocalText(str(name), column).documents(Reading(repr))]


def _rows(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".txt", ".utf8", ".raw", ".md"])
def test_text_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes("\ufeffGröße\r\nzwei".encode())
    assert _texts(path) == ["Größe\nzwei"]
    assert is_local(str(path))


def test_rows_of_json(tmp_path: Path) -> None:
    path = _rows(
        tmp_path / "a.jsonl", {"text": "one", "note": "x"}, {"text": "", "note": ""}, {"text": "two", "note": "y"}
    )
    assert _texts(path) == ["one", "two"]
    assert _texts(path, "note") == ["x", "y"]


def test_several_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "b.txt").write_text("b")
    (tmp_path / "deep" / "er" / "c.txt").write_text("c")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\xff")
    (tmp_path / "a, b.txt").write_text("comma")
    (tmp_path / "a.txt").write_text("a")
    assert _texts(tmp_path / "deep") == ["b", "c"]
    assert _texts(f"{tmp_path / 'a.txt'}, {tmp_path / 'deep'}") == ["a", "b", "c"]
    assert _texts(tmp_path / "a, b.txt") == ["comma"]
    source = LocalText(f"{tmp_path / 'a.txt'},{tmp_path / 'deep'}")
    assert source.name == "a.txt,b.txt,c.txt"
    assert source.facts() == {"files": [{"name": name, "size": 1} for name in ("a.txt", "b.txt", "c.txt")]}


def test_a_long_file_is_many_documents_and_all_of_it(tmp_path: Path) -> None:
    text = "".join(f"Line {i} of a long text.\n" for i in range(100_000))
    (tmp_path / "a.txt").write_text(text)
    documents = _texts(tmp_path / "a.txt")
    assert len(documents) > 200
    assert "".join(documents) == text


def test_what_is_written_like_files_is_local(tmp_path: Path) -> None:
    assert is_local("missing.txt")
    assert is_local("missing.txt,other.jsonl")
    assert is_local(str(tmp_path))
    assert not is_local("allenai/c4:en:train")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"ok \xff\xfe", "a.txt", r"a\.txt: is not UTF-8 .*0xff.*iconv"),
        (b'{"text": "a"}\n{"text": \n', "a.jsonl", r"a\.jsonl, line 2: is not JSON"),
        (b'["a"]\n', "a.jsonl", r"line 1: holds a list, expected an object"),
        (b'{"body": "a", "id": 1}\n', "a.jsonl", r"line 1: there is no column .* 'body', 'id'"),
        (b"x", "a.pdf", r"a\.pdf: expected a file that ends in \.txt"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=message):
        _texts(tmp_path / name)


def test_places_without_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no such file"):
        _texts(tmp_path / "missing.txt")
    with pytest.raises(OptionError, match=r"the folder holds no file that ends in \.txt"):
        _texts(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(OptionError, match="there is no such file"):
        _texts(f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}")


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_text, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(OptionError, match=r"needs the package pyarrow; install inferencex\[datasets\]"):
        LocalText(str(tmp_path / "a.parquet"))


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    chat = [[{"role": "user", "content": "hi"}], None, [{"role": "user", "content": "again"}]]
    table = pyarrow.table({"id": list(range(600)), "text": [f"row {i}" for i in range(600)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    pyarrow.parquet.write_table(pyarrow.table({"messages": chat}), tmp_path / "b.parquet")
    assert _texts(tmp_path / "a.parquet") == [f"row {i}" for i in range(600)]
    assert _texts(tmp_path / "b.parquet") == [repr(messages) for messages in chat if messages]
    with pytest.raises(
        OptionError, match=r"a\.parquet, row 1: there is no column 'body'; its columns are 'id', 'text'"
    ):
        _texts(tmp_path / "a.parquet", "body")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but not")
    with pytest.raises(OptionError, match=r"c\.parquet: is not a Parquet file"):
        _texts(tmp_path / "c.parquet")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_regular_file_is_not_waited_for(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path = Path(f"a{suffix}")
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(OptionError, match="is not a regular file"):
            LocalText(str(path))


def test_text_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    _rows(tmp_path / "a.jsonl", {"note": "x"})
    for name in (tmp_path / "a.txt", f"{tmp_path / 'a.jsonl'},{tmp_path / 'a.txt'}"):
        with pytest.raises(OptionError, match=r"a\.txt#note: a text file has no columns"):
            LocalText(str(name), "note")


def test_the_home_of_nobody() -> None:
    with pytest.raises(OptionError, match="no such user"):
        is_local("~nobody-of-that-name/a.txt")
