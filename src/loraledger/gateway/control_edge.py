"""The edge of the control plane: who may ask, what is read of a body, and what every answer looks like.

Theory of operation. Keys are compared as digests, in constant time. A body is read up to a limit, whatever its length claims to be.
Errors have the shape of the data plane's, so that one client code reads both. Everything else is in ``control``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Final, Protocol, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraledger.errors import (
    BadRequestError,
    ForbiddenError,
    InternalError,
    LedgerError,
    MethodError,
    TooLargeError,
    UnauthorizedError,
    UnknownPathError,
)
from loraledger.gateway.auth import bearer_of
from loraledger.gateway.replies import error_body

MAX_BODY: Final = 64 * 1024
"""Bytes. The largest sensible body names one replica."""
MAX_ROWS: Final = 1000
MAX_SHOWN: Final = 256
"""Characters of a wrong name or path that an error repeats."""
MAX_LISTED: Final = 16
"""So many known names are listed where none is near."""
_OPEN: Final = frozenset({"/health", "/ready", "/version"})

T = TypeVar("T")


class KeyHolder(Protocol):
    """Who knows the key, which may change while serving."""

    @property
    def key(self) -> str | None:
        """The key that callers must have; ``None``: none."""
        ...


class Guard:
    """Refuses who has no key, and what a browser sends for another site."""

    def __init__(self, app: ASGIApp, holder: KeyHolder) -> None:
        self._app = app
        self._holder = holder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it with the objection."""
        if scope["type"] == "http" and (error := self._objection(scope)) is not None:
            await error_answer(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> LedgerError | None:
        request = Request(scope)
        if self._holder.key is None and not _is_local(request.headers.get("host", "")):
            # A page elsewhere whose name was made to point here ("DNS rebinding") would pass as this site's own.
            return ForbiddenError("without a key the control plane answers to loopback names only: set control.key")
        if scope["path"] not in _OPEN and not may(self._holder, request.headers.get("authorization")):
            return UnauthorizedError("this is the control plane: send its key as a bearer token")
        if scope["method"] not in {"GET", "HEAD"}:
            site = request.headers.get("sec-fetch-site", "none")
            if site not in {"none", "same-origin"}:
                return ForbiddenError("a page of another site may not change anything here")
        return None


def _is_local(host: str) -> bool:
    """Whether a ``Host`` header names this machine itself. An absent one comes from no browser."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    return name.lower() in {"", "localhost", "::1", "[::1]"} or re.fullmatch(r"127(\.\d{1,3}){3}", name) is not None


def may(holder: KeyHolder, authorization: str | None) -> bool:
    """Whether a caller may see and do everything. Takes the same time whatever key was sent."""
    if holder.key is None:
        return True
    offered = bearer_of(authorization.encode("latin-1")) if authorization is not None else None
    digests = [hashlib.sha256(key).digest() for key in (offered or b"", holder.key.encode())]
    return hmac.compare_digest(*digests)


async def read_body(request: Request, shape: type[T]) -> T:
    """The request's JSON body; an absent one is ``{}``. Raises BadRequestError or TooLargeError."""
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY:
                raise TooLargeError(f"the body is over {MAX_BODY} bytes")
        return msgspec.json.decode(bytes(data) or b"{}", type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is not what is expected here: {error}") from error
    except ClientDisconnect as error:
        raise BadRequestError("the body broke off") from error


def read_limit(text: str | None) -> int:
    """How many rows are asked for, 100 by default. Raises BadRequestError."""
    if text is None:
        return 100
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MAX_ROWS):
        raise BadRequestError(f"limit must be a number from 1 to {MAX_ROWS}", param="limit")
    return int(text)


def unknown(what: str, name: str, known: Collection[str]) -> LedgerError:
    """The error for a name that is not among ``known``: with a near miss, or with all of them if they are few."""
    # difflib takes about 20 us for two long names: only those that look alike are held against it.
    alike = (other for other in known if other[:1] == name[:1] and abs(len(other) - len(name)) <= 2)
    near = get_close_matches(name, list(islice(alike, 64)), n=1, cutoff=0.6) if len(name) <= MAX_SHOWN else []
    listed = f"; known: {', '.join(known)}" if 0 < len(known) <= MAX_LISTED else ""
    hint = f"; did you mean {near[0]!r}?" if near else listed
    return UnknownPathError(f"no {what} {name[:MAX_SHOWN]!r} here{hint}", code=f"{what}_not_found", param=what)


def json_answer(content: object, status: int = 200) -> Response:
    """``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_answer(error: LedgerError, headers: Mapping[str, str] | None = None) -> Response:
    """``error`` in the shape of the data plane's errors."""
    content = error_body(error.status, error.message, error.code, error.param)
    response = Response(content, error.status, headers, media_type="application/json")
    response.headers["x-loraledger-reason"] = error.code
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = "Bearer"
    return response


def error_handlers() -> dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    """How Starlette is to answer what handlers raise."""
    return {LedgerError: _refused, HTTPException: _not_routed, Exception: _broken}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, LedgerError)
    return error_answer(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    """Starlette raises 404 and 405 itself."""
    assert isinstance(error, HTTPException)
    if error.status_code == MethodError.status:
        return error_answer(
            MethodError(f"{request.url.path[:MAX_SHOWN]} does not take {request.method}"), error.headers
        )
    return error_answer(UnknownPathError(f"nothing is at {request.url.path[:MAX_SHOWN]}"))


async def _broken(request: Request, error: Exception) -> Response:
    """Starlette raises the error again once this is sent, so that the server logs it."""
    return error_answer(InternalError("the gateway failed to answer; its log says why"))
