"""The one exception tree. Whose fault it is decides the HTTP status and the exit code.

::

    LedgerError
    ├── CallerError                    the request was wrong              4xx
    │   ├── BadRequestError            400 invalid_request
    │   ├── UnauthorizedError          401 invalid_api_key
    │   ├── ForbiddenError             403 forbidden
    │   ├── UnknownModelError          404 model_not_found
    │   ├── UnknownPathError           404 unknown_path
    │   ├── MethodError                405 method_not_allowed
    │   ├── SlowRequestError           408 request_timeout
    │   ├── ConflictError              409 conflict
    │   ├── TooLargeError              413 body_too_large
    │   ├── MediaTypeError             415 unsupported_media_type
    │   ├── ExpectationError           417 expectation_failed
    │   └── HeadersTooLargeError       431 headers_too_large
    ├── FleetError                     no replica could answer            5xx
    │   ├── UnavailableError           503 no replica may take the request now
    │   ├── UpstreamError              502 upstream_failed
    │   └── UpstreamTimeoutError       504 upstream_timeout
    ├── ConfigError                    the operator's file is wrong       exit 3
    ├── InputFileError                 a trace, record or adapter file is wrong   exit 3
    ├── TargetError                    a replica or gateway cannot be reached     exit 4
    ├── ObjectiveError                 a check or an objective is not met         exit 5
    └── InternalError                  ours: an invariant broke           500, exit 1

``status`` is the HTTP status, ``code`` the stable machine-readable reason that clients and records see, ``exit_code`` what
the command line returns. A reason given at raise time replaces ``code`` where the tree says so.
"""

from __future__ import annotations


class LedgerError(Exception):
    """Root of all errors that this package raises on purpose."""

    status: int = 500
    code: str = "internal_error"
    exit_code: int = 1

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class CallerError(LedgerError):
    """The client's request is at fault."""

    status = 400
    code = "invalid_request"


class BadRequestError(CallerError):
    """Malformed HTTP or JSON, or a field of the wrong kind."""


class UnauthorizedError(CallerError):
    """No key, or one that no tenant has."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(CallerError):
    """A valid key that may not do this."""

    status = 403
    code = "forbidden"


class UnknownModelError(CallerError):
    """The model is not one that this tenant may call: never answered by the base instead."""

    status = 404
    code = "model_not_found"


class UnknownPathError(CallerError):
    """Not on the allow-list of forwarded paths."""

    status = 404
    code = "unknown_path"


class MethodError(CallerError):
    """The path exists with another method."""

    status = 405
    code = "method_not_allowed"


class SlowRequestError(CallerError):
    """Head or body did not arrive within its limit."""

    status = 408
    code = "request_timeout"


class ConflictError(CallerError):
    """What is asked does not fit how things stand now."""

    status = 409
    code = "conflict"


class TooLargeError(CallerError):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class MediaTypeError(CallerError):
    """A body that is not plain JSON."""

    status = 415
    code = "unsupported_media_type"


class ExpectationError(CallerError):
    """An expectation other than to be told to go on."""

    status = 417
    code = "expectation_failed"


class HeadersTooLargeError(CallerError):
    """The head is over the limit."""

    status = 431
    code = "headers_too_large"


class FleetError(LedgerError):
    """The fleet could not answer a good request."""

    status = 503
    code = "unavailable"


class UnavailableError(FleetError):
    """No replica may take the request now."""


class UpstreamError(FleetError):
    """A replica broke the exchange."""

    status = 502
    code = "upstream_failed"


class UpstreamTimeoutError(FleetError):
    """A replica did not answer in time."""

    status = 504
    code = "upstream_timeout"


class ConfigError(LedgerError):
    """The configuration cannot be used; the message names field and remedy."""

    code = "bad_config"
    exit_code = 3


class InputFileError(LedgerError):
    """An input file (trace, record, adapter) cannot be used."""

    code = "bad_input_file"
    exit_code = 3


class TargetError(LedgerError):
    """A replica or gateway could not be reached."""

    status = 502
    code = "target_unreachable"
    exit_code = 4


class ObjectiveError(LedgerError):
    """A check or an objective was evaluated and is not met."""

    code = "objective_not_met"
    exit_code = 5


class InternalError(LedgerError):
    """An invariant of ours broke."""
