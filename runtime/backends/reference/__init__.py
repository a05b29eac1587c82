"""The reference backend: executes the IR operator by operator in torch at float32. Slow, and obviously right."""

from inferencex.runtime.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
