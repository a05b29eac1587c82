"""Calibrated quantization: text through the graph, block by block, and what its linears saw of it."""
