from __future__ import annotations

import yaml

from inferencex.runtime.server.config.catalogue import keys
from inferencex.runtime.server.config.load import load_settings
from inferencex.runtime.server.config.show import HIDDEN, config_lines


def test_every_setting_is_shown_with_its_origin_and_keys_are_not() -> None:
    resolved = load_settings(
        {"server.api_keys": ["top-secret-key"], "model.path": ["a b"]}, {"INFERENCEX_ENGINE__MAX_NUM_SEQS": "7"}
    )
    text = "\n".join(config_lines(resolved))
    assert "top-secret-key" not in text and HIDDEN in text
    assert "top-secret-key" not in repr(resolved)
    shown = yaml.safe_load(text)
    assert {f"{section}.{name}" for section, values in shown.items() for name in values} == {k.path for k in keys()}
    assert shown["model"]["path"] == ["a b"] and shown["engine"]["max_num_seqs"] == 7
    assert "max_num_seqs: 7  # INFERENCEX_ENGINE__MAX_NUM_SEQS" in text
    assert "port: 8000  # default" in text and "# --model-path" in text
