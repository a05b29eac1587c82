"""Pipelines: a recipe's conversions, gates, exports and publications as a graph of cached steps."""
