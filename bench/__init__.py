"""Measurements that the documentation quotes, each with the command that repeats it."""
