"""Writes docs/modules.md from the first sentence of every module: python -m tests.module_list > docs/modules.md."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "convert", "formats", "recipes", "runtime", "bench")

HEAD = """# Modules

One sentence for each, taken from its docstring. [design.md](design.md) says how they work together; a test keeps this
page in step (`python -m tests.module_list > docs/modules.md`).
"""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for package in PACKAGES:
        folders = sorted({path.parent for path in (ROOT / package).rglob("*.py")})
        for folder in folders:
            files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            about = summary(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
            if not files and not about:
                continue
            lines += [f"## {folder.relative_to(ROOT).as_posix()}", "", about, ""]
            if files:
                lines += ["| module | |", "|---|---|"]
                lines += [f"| `{path.name}` | {summary(path)} |" for path in files]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
