"""Every error a user can cause, under one root; each says what was found, where, and what to do."""

from __future__ import annotations


class InferenceXError(Exception):
    """Root of all errors the command line prints as one line, without a traceback."""


class OptionError(InferenceXError):
    """An option, or a combination of options, that cannot be honoured."""


class SourceError(InferenceXError):
    """The checkpoint cannot be found, read or trusted."""


class CaptureError(InferenceXError):
    """The model's graph cannot be recorded, or uses something the IR has no form for."""


class QuantizationError(InferenceXError):
    """A tensor cannot be quantized as asked."""


class BundleError(InferenceXError):
    """A bundle is incomplete, damaged, or made by a version that cannot be read."""


class ExportError(InferenceXError):
    """A bundle holds something that the format it is to be exported to cannot say."""


class FidelityError(InferenceXError):
    """A written bundle does not compute what its source computes."""


class BackendError(InferenceXError):
    """A backend cannot run this bundle on this machine."""


class RequestError(InferenceXError):
    """A generation request that cannot be served as stated."""


class ContextLengthError(RequestError):
    """A request with more tokens than the model's context takes."""


class RecipeError(InferenceXError):
    """A recipe that cannot be read, states something that cannot be done, or did not meet what it asks for."""
