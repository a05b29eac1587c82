from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.config.catalogue import keys
from inferencex.runtime.server.config.load import Resolved, load_settings

FILE = """\
model:
  path: bundles/one
  max_model_len: 2048
server:
  host: 0.0.0.0
  port: 8001
  api_keys:
    - plain-key-1
    - key: plain-key-2
      name: batch
      tokens_per_minute: 1000
engine:
  max_num_batched_tokens: 256
  kv_cache_memory: 4GiB
  enable_prefix_caching: no
"""


def load(tmp_path: Path, text: str = "", env: dict[str, str] | None = None, **flags: Any) -> Resolved:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_settings({name.replace("__", "."): value for name, value in flags.items()}, env or {}, path)


def refusal(tmp_path: Path, text: str = "", env: dict[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(OptionError) as caught:
        load(tmp_path, text, env, **flags)
    return str(caught.value).replace(str(tmp_path / "config.yaml"), "config.yaml")


def test_a_file(tmp_path: Path) -> None:
    settings = load(tmp_path, FILE).settings
    assert settings.model.path == (Path("bundles/one"),)
    assert settings.model.max_model_len == 2048
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8001)
    assert settings.engine.kv_cache_memory == 4 << 30
    assert settings.engine.enable_prefix_caching is False
    first, second = settings.server.api_keys
    assert first.key.get_secret_value() == "plain-key-1" and first.name is None
    assert (second.name, second.tokens_per_minute) == ("batch", 1000)


def test_flags_go_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    env = {
        "INFERENCEX_SERVER__PORT": "8002",
        "INFERENCEX_ENGINE__MAX_NUM_SEQS": "3",
        "INFERENCEX_ENGINE__THREADS": "",
        "INFERENCEX_DEBUG": "1",
        "HOME": "/root",
    }
    found = load(tmp_path, FILE, env, server__port="8003", engine__max_num_seqs=None)
    assert found.settings.server.port == 8003
    assert found.settings.engine.max_num_seqs == 3
    assert found.settings.engine.threads is None
    assert found.settings.engine.max_num_batched_tokens == 256
    assert found.origins["server.port"] == "--port"
    assert found.origins["engine.max_num_seqs"] == "INFERENCEX_ENGINE__MAX_NUM_SEQS"
    assert found.origins["engine.max_num_batched_tokens"].endswith("config.yaml, line 13")
    assert "engine.block_size" not in found.origins


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE, encoding="utf-8")
    assert load_settings({}, {"INFERENCEX_CONFIG": str(path)}).settings.server.port == 8001


def test_lists_replace_lists_and_one_value_is_a_list(tmp_path: Path) -> None:
    env = {
        "INFERENCEX_MODEL__PATH": "one, two",
        "INFERENCEX_SERVER__API_KEYS": '[{"key": "json-key-1", "priority": 3}]',
    }
    settings = load(tmp_path, FILE, env).settings
    assert settings.model.path == (Path("one"), Path("two"))
    assert [key.priority for key in settings.server.api_keys] == [3]
    assert load(tmp_path, "server: {cors_origins: https://a.example}").settings.server.cors_origins == (
        "https://a.example",
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:\nserver:\n", "engine: {threads: }\n"])
def test_what_is_left_out_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text).settings == load_settings({}, {}).settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  prot: 80\n", "config.yaml, line 2: server has no key 'prot'; did you mean port?"),
        ("servers:\n  port: 80\n", "config.yaml, line 1: there is no section 'servers'; did you mean server?"),
        ("port: 80\n", "config.yaml, line 1: there is no section 'port'; did you mean server.port?"),
        (
            "server:\n  max_num_seqs: 1\n",
            "config.yaml, line 2: server has no key 'max_num_seqs'; did you mean engine.max_num_seqs?",
        ),
        (
            "model:\n  model-path: x\n",
            "config.yaml, line 2: model has no key 'model-path'; did you mean model.path?",
        ),
        (
            "server:\n  max_num_seq: 1\n",
            "config.yaml, line 2: server has no key 'max_num_seq'; did you mean engine.max_num_seqs?",
        ),
        ("server:\n  port: 1\n  port: 2\n", "config.yaml, line 3: 'port' is there twice"),
        ("- a\n", "config.yaml, line 1: expected the sections model, server, engine, as a mapping"),
        ("server: 5\n", "config.yaml, line 1: expected the keys of server, as a mapping"),
        ("server:\n  port: [\n", "config.yaml, line 3: is not YAML: "),
        ("server:\n  port: eighty\n", "config.yaml, line 2: server.port is 'eighty', expected an integer"),
        ("server:\n  port: 70000\n", "config.yaml, line 2: server.port is 70000, expected an integer of at most 65535"),
        ("server:\n  port:\n", "config.yaml, line 2: server.port is None, expected an integer"),
        ("server:\n  host: 5\n", "config.yaml, line 2: server.host is 5, expected a text"),
        (
            "engine:\n  scheduling_policy: lifo\n",
            "config.yaml, line 2: engine.scheduling_policy is 'lifo', expected one of fcfs, priority",
        ),
        (
            "engine:\n  kv_cache_memory: lots\n",
            "config.yaml, line 2: engine.kv_cache_memory is 'lots', expected a size such as 4GiB, 512MB or 1048576",
        ),
        (
            "engine:\n  gpu_memory_utilization: 1.5\n",
            "config.yaml, line 2: engine.gpu_memory_utilization is 1.5, expected a number of at most 1.0",
        ),
        (
            "server:\n  protect: [docs, moon]\nengine: {}\n",
            "config.yaml, line 2: server.protect is 'moon', "
            "expected one of docs, health, metrics, page, or a list of such",
        ),
        (
            "server:\n  api_keys:\n    - key: sesame-sesame\n      conurrent: 1\n",
            "config.yaml, line 4: server.api_keys[0].conurrent is unknown; did you mean concurrent?",
        ),
        (
            "server:\n  api_keys:\n    - key: sesame-sesame\n      concurrent: 0\n",
            "config.yaml, line 4: server.api_keys[0].concurrent: input should be greater than or equal to 1",
        ),
        ("server:\n  tls_key: a.pem\n", "server: tls_certificate and tls_key go together; give both, or neither"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("INFERENCEX_PORT", "80", "sets nothing; did you mean INFERENCEX_SERVER__PORT?"),
        ("INFERENCEX_SERVER_PORT", "80", "sets nothing; did you mean INFERENCEX_SERVER__PORT?"),
        ("INFERENCEX_SERVER__PROT", "80", "sets nothing; did you mean INFERENCEX_SERVER__PORT?"),
        ("INFERENCEX_API_KEY", "a-key", "sets nothing; did you mean INFERENCEX_SERVER__API_KEYS?"),
        ("INFERENCEX_XYZZY", "1", "sets nothing; variables are called INFERENCEX_<SECTION>__<KEY>"),
        ("INFERENCEX_SERVER__PORT", "x", "INFERENCEX_SERVER__PORT: server.port is 'x', expected an integer"),
        ("INFERENCEX_SERVER__API_KEYS", "[{", "INFERENCEX_SERVER__API_KEYS: begins like JSON and is not"),
    ],
)
def test_mistakes_in_variables(tmp_path: Path, name: str, value: str, message: str) -> None:
    assert message in refusal(tmp_path, env={name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INFERENCEX_PORT", "tcp://10.0.0.1:8000"),
        ("INFERENCEX_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("INFERENCEX_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("INFERENCEX_SERVICE_HOST", "10.0.0.1"),
        ("INFERENCEX_SERVICE_PORT", "8000"),
        ("INFERENCEX_SERVICE_PORT_HTTP", "8000"),
        ("INFERENCEX_CANARY_SERVICE_HOST", "10.0.0.1"),
        ("INFERENCEX_SERVER_PORT", "tcp://10.0.0.1:8000"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_this_name_is_left_alone(tmp_path: Path, name: str, value: str) -> None:
    assert load(tmp_path, env={name: value}).settings == load_settings({}, {}).settings


def test_mistakes_in_flags_are_said_of_the_flag(tmp_path: Path) -> None:
    assert refusal(tmp_path, server__port="x") == "--port is 'x', expected an integer"
    assert refusal(tmp_path, engine__threads="0") == "--threads is '0', expected an integer of at least 1"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--config .*absent.yaml: No such file"):
        load_settings({}, {}, tmp_path / "absent.yaml")


@pytest.mark.parametrize("key", ["short", "has spaces in it", "sha256:zz", "sha256:00:" + "0" * 64, "ключключключ"])
def test_a_key_that_is_refused_is_not_shown(tmp_path: Path, key: str) -> None:
    for message in (refusal(tmp_path, server__api_keys=[key]), refusal(tmp_path, f"server: {{api_keys: '{key}'}}")):
        assert key not in message.replace("sha256:<", "").replace("`inferencex serve --hash-key`", "")


def test_every_key_has_a_flag_a_variable_and_help() -> None:
    for name in ("flag", "variable", "path", "help"):
        values = [getattr(key, name) for key in keys()]
        assert all(values) and len(set(values)) == len(values), name
    off = {key.off_flag for key in keys()} - {None}
    assert not off & {key.flag for key in keys()}
