"""Native kernels and the step executor of the CPU backend, built from the C++ beside this file."""
