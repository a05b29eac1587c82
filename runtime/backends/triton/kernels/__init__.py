"""Triton kernels, one family a file: the functions that run on the device, then what launches them."""
