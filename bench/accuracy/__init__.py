"""Accuracy of quantized models at equal bits: our methods and those of our peers, in one harness."""
