from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from inferencex.cli.main import COMMANDS

# A finder that fails where these are looked for, as in an environment without the extras.
WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "onnxscript", "accelerate", "gguf", "huggingface_hub"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def inferencex(*arguments: str, prelude: str = "", epilogue: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport sys\nfrom inferencex.cli.main import main\nsys.argv = ['inferencex', *{arguments!r}]\n"
    code += f"try:\n    main()\nfinally:\n    {epilogue or 'pass'}\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_help_lists_every_command_and_imports_none() -> None:
    heavy = "assert not {'torch', 'transformers', 'numpy', 'onnx'} & set(sys.modules), 'imported'"
    for arguments in ((), ("--help",)):
        result = inferencex(*arguments, prelude=WITHOUT, epilogue=heavy)
        assert (result.returncode, result.stderr) == (0, "")
        for name, command in COMMANDS.items():
            assert name in result.stdout and command.help[:40] in result.stdout


def test_help_of_run_needs_no_extra_and_is_called_by_its_name() -> None:
    heavy = "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules), 'imported'"
    result = inferencex("run", "--help", prelude=WITHOUT, epilogue=heavy)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage: inferencex run [OPTIONS]" in result.stdout
    assert "--prompt" in result.stdout


def test_convert_without_its_extra_says_what_to_install() -> None:
    pytest.importorskip("inferencex.convert.cli")
    result = inferencex("convert", "--model-id", "x", "--output", "y", prelude=WITHOUT)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "pip install 'inferencex[convert]'" in result.stderr


def test_version() -> None:
    try:
        installed = version("inferencex")
    except PackageNotFoundError:
        pytest.skip("the package runs from its folder here, it is not installed")
    result = inferencex("--version")
    assert (result.returncode, result.stdout) == (0, f"inferencex {installed}\n")


@pytest.mark.parametrize("argument", ["destroy", "--destroy"])
def test_an_unknown_command_is_wrong_use(argument: str) -> None:
    result = inferencex(argument)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and argument in result.stderr and "inferencex --help" in result.stderr


def test_arguments_reach_the_command_as_they_are() -> None:
    result = inferencex("run", "--nonsense", "--", "--prompt")
    assert result.returncode == 2
    assert result.stderr.startswith("error: No such option: --nonsense")
    assert result.stderr.endswith("(see: inferencex run --help)\n")
