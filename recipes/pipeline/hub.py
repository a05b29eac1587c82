"""What can go wrong on the way to the Hugging Face hub."""

from __future__ import annotations


def transport_error() -> type[Exception]:
    """Return the base of all errors of the HTTP client that huggingface_hub uses, httpx or its successor.

    Raises ModuleNotFoundError without huggingface_hub.
    """
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base
