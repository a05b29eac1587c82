"""Sizes on disk, of a folder of packages that is made up."""

from __future__ import annotations

from pathlib import Path

from bench.install_size import REST, sizes


def test_every_block_is_counted_once(tmp_path: Path) -> None:
    for name, size in (("large", 200_000), ("small", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_bytes(b"#" * size)
        information = tmp_path / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        listed = [f"{name}/module.py", f"{name}-1.0.dist-info/METADATA", "../bin/command", f"{name}/gone.py"]
        (information / "RECORD").write_text("".join(f"{path},,\n" for path in listed))
    (tmp_path / "foreign.py").write_bytes(b"#" * 30_000)
    found = sizes(tmp_path)
    assert list(found) == ["large 1.0", REST, "small 1.0"]
    assert found["large 1.0"] >= 200_000 > found[REST] >= 30_000 > found["small 1.0"] >= 0
    everything = [tmp_path, *tmp_path.rglob("*")]
    assert sum(found.values()) == sum(path.lstat().st_blocks * 512 for path in everything)
