"""Servers as processes: ready, measured, stopped; and what is said of one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from bench.engines import NAMES, OURS
from bench.serve.load import Load, prompts
from bench.serve.measure import IncompleteError, measure_server
from bench.serve.offline import OfflineError, offline_rates
from bench.serve.process import ServerError, check_installed, running
from bench.serve.servers import SERVERS, Server
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.errors import RequestError
from inferencex.runtime.load_test.api import RequestShape, only_model
from inferencex.runtime.load_test.connection import HttpClient, Origin
from inferencex.runtime.load_test.words import WORDS
from tests.smollm2 import Quiet

LOAD = Load(threads=1, concurrency=3, prompt_tokens=9, output_tokens=4, requests=5, repeat=2)


@dataclass
class Scripted:
    """A scripted server in the place of a real one."""

    case: str
    engine: str = OURS
    module: str = "tests.bench.serve.scripted_server"
    as_text: bool = False
    settings: str = "scripted"
    model: str = "tiny"

    def command(self, folder: Path, port: int, load: Load) -> list[str]:
        return ["-m", self.module, str(port), self.case]

    def environment(self, load: Load) -> Mapping[str, str]:
        return {}

    def shape(self, load: Load, stream: bool) -> RequestShape:
        return RequestShape(self.model, stream=stream, ignore_eos=True)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer to which every word is a token."""
    folder = tmp_path_factory.mktemp("words")
    vocabulary = {word: place for place, word in enumerate(("<unk>", *WORDS))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_server_is_measured_and_stopped(tmp_path: Path, words: Path) -> None:
    server = Scripted("serves")
    check_installed(server)
    with running(server, tmp_path, LOAD, tmp_path / "log", 60.0) as origin:
        served = measure_server(server, origin, LOAD, words, 60.0)
        text = Scripted("serves", as_text=True)
        assert {each.output_tokens for each in measure_server(text, origin, LOAD, words, 60.0)} == {4}
    assert [each.stream for each in served] == [True, False, True, False]
    assert all((each.prompt_tokens, each.output_tokens) == (9, 4) for each in served)
    assert [each.gap_p50 is None for each in served] == [False, True] * 2
    with pytest.raises(RequestError, match="cannot be reached"):
        asyncio.run(only_model(HttpClient(origin)))


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ends = running(Scripted("ends"), tmp_path, LOAD, log, 60.0)
    with pytest.raises(ServerError, match="ended with status 1: there is no such model"), ends:
        pass


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    waits = running(Scripted("waits"), tmp_path, LOAD, tmp_path / "log", 0.1)
    with pytest.raises(ServerError, match="was not ready in time"), waits:
        pass


def test_a_server_that_is_not_installed_is_said() -> None:
    with pytest.raises(ServerError, match="No module named 'no_such_server'"):
        check_installed(Scripted("serves", module="no_such_server"))


def test_a_load_that_fails_has_no_figures(words: Path) -> None:
    nobody = Origin("127.0.0.1", 9, "", False)
    with pytest.raises(IncompleteError, match="3 of 3 requests failed: connect"):
        measure_server(Scripted("serves"), nobody, LOAD, words, 5.0)


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_is_one_of_an_engine_and_keeps_to_the_load(name: str, tmp_path: Path) -> None:
    server: Server = SERVERS[name]
    assert server.engine == name and name in NAMES and server.settings
    command = server.command(tmp_path, 1234, LOAD)
    assert "1234" in command and str(LOAD.longest) in command
    assert server.environment(LOAD) is not None
    assert server.shape(LOAD, stream=True).stream and not server.shape(LOAD, stream=False).stream


def test_our_flags_exist() -> None:
    pytest.importorskip("pydantic_settings")
    from inferencex.runtime.server.config.catalogue import keys

    flags = {key.flag for key in keys()}
    assert {part for part in SERVERS[OURS].command(Path(), 1, LOAD) if part.startswith("--")} <= flags


def test_prompts_are_never_asked_twice(words: Path) -> None:
    batches = prompts(LOAD, words, as_text=False, seed="a")
    asked = [tuple(map(int, prompt.content)) for _ in range(4) for prompt in next(batches)]  # type: ignore[arg-type]
    assert len(asked) == len(set(asked)) == 20 and {*map(len, asked)} == {9}
    assert next(prompts(LOAD, words, as_text=False, seed="b"))[0].content != [*asked[0]]


def test_our_engine_without_a_server(shared_data: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    convert(ConvertOptions(str(shared_data / "stories260k"), bundle, parse_scheme("none"), verify=False), Quiet())
    rates = offline_rates(bundle, LOAD)
    assert len(rates) == 2 and min(rates) > 0
    with pytest.raises(OfflineError, match="nowhere"):
        offline_rates(tmp_path / "nowhere", LOAD)


def test_a_load_survives_a_command_line() -> None:
    assert Load.parse(LOAD.dump()) == LOAD
