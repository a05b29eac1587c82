"""Continuous batching over any backend: sequences, block pool, prefix cache, scheduler, step batch, sampler."""
