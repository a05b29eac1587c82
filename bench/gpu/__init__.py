"""The GPU kernels: what they are compiled to, whether they are right, and how fast they are."""
