"""Checkpoints to bundles: sources, capture as a graph, passes over it, quantization, packing."""
