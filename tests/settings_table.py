"""Writes the table of settings into docs/serving.md: python -m tests.settings_table."""

from __future__ import annotations

from pathlib import Path

from inferencex.runtime.server.config.catalogue import Key, keys, sections
from inferencex.runtime.server.config.keys_setting import ApiKey
from inferencex.runtime.server.config.settings import Settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- settings: made by python -m tests.settings_table -->", "<!-- /settings -->"


def table() -> str:
    """Return what stands between the marks: a table for each section, and one for the fields of a key."""
    lines: list[str] = []
    for section in sections():
        about = Settings.model_fields[section].annotation
        assert about is not None
        lines += [
            f"**`{section}:`** {about.__doc__}",
            "",
            "| key | default | flag | variable | |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(key) for key in keys() if key.section == section]
        lines.append("")
    lines += ["**An entry of `api_keys` or `admin_keys`** is a text, or has these fields.", "", "| field | default | |"]
    lines.append("|---|---|---|")
    for name, field in ApiKey.model_fields.items():
        default = "" if field.is_required() or field.default is None else f"`{field.default}`".lower()
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def _row(key: Key) -> str:
    default = f"`{key.shown_default}`" if key.shown_default else ""
    flag = f"`{key.flag}`" + (f", `{key.off_flag}`" if key.off_flag else "")
    choices = f" One of {', '.join(f'`{choice}`' for choice in key.choices)}." if key.choices else ""
    repeated = " Repeat the flag for several." if key.repeated else ""
    return f"| `{key.name}` | {default} | {flag} | `{key.variable}` | {key.help}{choices}{repeated} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
