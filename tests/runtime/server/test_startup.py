"""What a configuration means for the models, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from inferencex.runtime.server.config.settings import ModelSettings, Settings
from inferencex.runtime.server.startup import check, load_requests


def test_a_bundle_is_called_as_its_link_is(tmp_path: Path) -> None:
    (tmp_path / "v7").mkdir()
    (tmp_path / "current").symlink_to("v7")
    settings = Settings(model=ModelSettings(path=(tmp_path / "v7", tmp_path / "current")))
    check(settings)
    assert [request.uid for request in load_requests(settings)] == ["v7", "current"]
