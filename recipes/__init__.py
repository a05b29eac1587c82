"""Longer procedures on top of converter and runtime, such as comparing bundles with each other."""
