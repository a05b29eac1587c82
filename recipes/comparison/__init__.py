"""Bundles beside each other: quality, size and speed, as a table and as plots."""
