"""Native kernels of conversion, built from the C++ beside this file."""
