"""Checkpoints whose weights are quantized already: each published layout read into the form that bundles store."""
