"""What the runtime takes on disk: each package, and all of them.

    python -m bench.install_size [--limit 250] [-- OPTIONS OF pip install]

Builds a wheel of this repository, installs it alone, no extra, into a new virtual environment, and measures that one's
site-packages as `du` does: disk blocks, with the bytecode compiled, and with pip itself. The exit status is 1 when the
sum is above `--limit`, in MiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REST = "(folders, and what no package lists)"


def install(folder: Path, options: Sequence[str]) -> Path:
    """Build and install the runtime below `folder`; return its site-packages."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={folder / 'build'}"]
    subprocess.run([*pip, *build, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (python,) = environment.glob("bin/python")
    constraints = ["-c", str(ROOT / "constraints.txt")]
    command = [str(python), *pip[1:], "install", "--quiet", "--compile", *constraints, *options, str(wheel)]
    subprocess.run(command, check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def disk_usage(path: Path) -> int:
    """Return the bytes of the disk blocks that a file takes, or a folder without its contents."""
    return path.lstat().st_blocks * 512


def sizes(packages: Path) -> dict[str, int]:
    """Return the bytes on disk by package, the largest first; the values' sum is all of the folder."""
    found: dict[str, int] = {}
    for distribution in distributions(path=[str(packages)]):
        found[f"{distribution.name} {distribution.version}"] = sum(map(disk_usage, _files(distribution, packages)))
    everything = disk_usage(packages) + sum(map(disk_usage, packages.rglob("*")))
    found[REST] = everything - sum(found.values())
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _files(distribution: Distribution, packages: Path) -> set[Path]:
    """Return the files of a package that are below `packages`; its commands lie elsewhere."""
    listed = {Path(str(file.locate())).resolve() for file in distribution.files or ()}
    return {path for path in listed if path.is_relative_to(packages.resolve()) and path.is_file()}


def main() -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=250, help="MiB (%(default)s)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, rest = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        measured = sizes(install(Path(folder), rest))
    for name, size in measured.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    total = sum(measured.values()) / 2**20
    print(f"{total:8.1f} MiB  in all, the limit is {options.limit}")
    return int(total > options.limit)


if __name__ == "__main__":
    sys.exit(main())
