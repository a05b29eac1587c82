"""What a client is told when a request cannot be served: status, type and code as OpenAI's API names them."""

from __future__ import annotations

from typing import Any, ClassVar

from inferencex.formats.errors import ContextLengthError, InferenceXError, RequestError


class ServiceError(InferenceXError):
    """Root of the errors that reach clients.

    param:       the field of the request that is to blame, as a path such as "messages.0.role"
    retry_after: seconds after which trying again makes sense
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.default_code
        self.param = param
        self.retry_after = retry_after

    @property
    def reason(self) -> str:
        """A short word for metrics and logs."""
        return self.code or self.type


class InvalidRequest(ServiceError):
    """The request is malformed, or asks for what this model cannot do."""

    status = 400
    type = "invalid_request_error"


class NotAuthenticated(ServiceError):
    """No key, or not one of ours."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ServiceError):
    """The key is known, and not enough for this."""

    status = 403
    type = "permission_error"
    default_code = "forbidden"


class ModelNotFound(ServiceError):
    """No model of that name is served."""

    status = 404
    type = "not_found_error"
    default_code = "model_not_found"


class Conflict(ServiceError):
    """What is asked for collides with what is there."""

    status = 409
    type = "conflict_error"
    default_code = "conflict"


class TooLarge(ServiceError):
    """The body is larger than this server takes."""

    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class TooManyRequests(ServiceError):
    """The queue, or one of the caller's quotas, is full."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Failed(ServiceError):
    """The backend failed while it served the request."""

    status = 500
    type = "server_error"
    default_code = "internal_error"


class Unavailable(ServiceError):
    """Not now: loading, draining, or unloading."""

    status = 503
    type = "server_error"
    default_code = "not_ready"


class TimedOut(ServiceError):
    """The request took longer than it was given."""

    status = 504
    type = "timeout_error"
    default_code = "timeout"


def body(error: ServiceError) -> dict[str, Any]:
    """Return the JSON of an error as OpenAI writes it."""
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}


def invalid(error: InferenceXError, param: str | None = None) -> InvalidRequest:
    """Return what a client is told of a request that the engine refuses."""
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return InvalidRequest(str(error), param=param, code=code)


def told(error: InferenceXError) -> ServiceError:
    """Return what a client is told of any of our errors: what is wrong with its request is 400, all else is 500."""
    if isinstance(error, ServiceError):
        return error
    return invalid(error) if isinstance(error, RequestError) else Failed(str(error))
