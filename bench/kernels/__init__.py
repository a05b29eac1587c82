"""Benchmarks of single operations of the CPU backend, beside what the machine can do."""
