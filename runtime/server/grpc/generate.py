"""Makes the generated code beside `v1/inference.proto`: `python -m inferencex.runtime.server.grpc.generate`.

It needs grpcio-tools. The code runs with the version of protobuf that those tools speak for, and with later ones up to
the next major version.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from inferencex.formats.errors import OptionError

FOLDER = Path(__file__).resolve().parent / "v1"
PROTO = "inference.proto"
GENERATED = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")
_PACKAGE_PATH = "inferencex/runtime/server/grpc/v1"  # the generated modules import each other by this path


def generate(folder: Path) -> list[Path]:
    """Write the generated modules into `folder` and return their paths.

    Raises OptionError when grpcio-tools is missing, or when it refuses the interface.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # A process of its own, for grpc_tools adds to the import path of the one that it is imported in.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{_PACKAGE_PATH}={FOLDER}"]
        command += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        done = subprocess.run([*command, f"{_PACKAGE_PATH}/{PROTO}"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OptionError(f"{FOLDER / PROTO}: {done.stderr.strip()}; grpcio-tools comes with inferencex[dev]")
        written = []
        for name in GENERATED:
            target = folder / name
            target.write_bytes((Path(scratch) / _PACKAGE_PATH / name).read_bytes())
            written.append(target)
    return written


if __name__ == "__main__":
    try:
        for path in generate(FOLDER):
            print(path)
    except OptionError as error:
        sys.exit(str(error))
