"""Bundles written in the formats of other tools, from what is in the bundle alone."""

from __future__ import annotations

from inferencex.formats.export.export import FORMATS, Exported, export_bundle

__all__ = ["FORMATS", "Exported", "export_bundle"]
