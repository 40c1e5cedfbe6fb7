"""What operators ask the change desk over the control plane: one route a step, one document about each change.

Every answer about a change is the same document, whatever was asked. A step that does not fit how things stand is a 409; a body
that cannot be is a 400 that names its field. Each body says who asks and what for: the journal keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraledger.errors import BadRequestError
from loraledger.gateway.changes import ChangeDesk
from loraledger.gateway.changes_case import Case, Evidence, Json, Proposal
from loraledger.gateway.control_edge import json_answer, read_body

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of most steps."""

    who: str
    why: str


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a rollout. ``share``: in place of the proposal's. ``although``: as ``why`` says, it goes against its replay."""

    who: str
    why: str
    share: float | None = None
    although: bool = False


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a replay. ``evidence``: an ``Evidence``; all of it is journalled, as it came."""

    who: str
    why: str
    evidence: Json


def change_routes(desk: ChangeDesk) -> list[Route]:
    """The routes under ``/api/changes``."""

    async def listing(request: Request) -> Response:
        return json_answer({"changes": [case.change for case in desk.cases.values()]})

    async def one(request: Request) -> Response:
        return json_answer(desk.view(request.path_params["id"]))

    async def propose(request: Request) -> Response:
        case = await desk.propose(await _read(request, Proposal))
        return json_answer(desk.view(case.change.id), 201)

    async def replay(request: Request) -> Case:
        body = await _read(request, Replay)
        _check_evidence(body.evidence)
        return await desk.replay(request.path_params["id"], body.who, body.why, body.evidence)

    async def roll_out(request: Request) -> Case:
        body = await _read(request, Rollout)
        return await desk.roll_out(request.path_params["id"], body.who, body.why, body.share, body.although)

    async def roll_back(request: Request) -> Case:
        body = await _read(request, Step)
        return await desk.roll_back(request.path_params["id"], body.who, body.why)

    async def withdraw(request: Request) -> Case:
        body = await _read(request, Step)
        return await desk.withdraw(request.path_params["id"], body.who, body.why)

    def step(verb: str, act: Callable[[Request], Awaitable[Case]]) -> Route:
        async def taken(request: Request) -> Response:
            return json_answer(desk.view((await act(request)).change.id))

        return Route(f"/api/changes/{{id}}/{verb}", taken, methods=["POST"])

    return [
        Route("/api/changes", listing, methods=["GET"]),
        Route("/api/changes", propose, methods=["POST"]),
        step("replay", replay),
        step("rollout", roll_out),
        step("rollback", roll_back),
        step("withdraw", withdraw),
        Route("/api/changes/{id}", one),
    ]


async def _read(request: Request, shape: type[T]) -> T:
    """As ``read_body``, the error naming the field; who and why are not empty."""
    try:
        body = await read_body(request, shape)
    except BadRequestError as error:
        raise BadRequestError(error.message, param=_named(error.message)) from error
    for field in ("who", "why"):
        if not getattr(body, field).strip():
            raise BadRequestError(f"{field} is empty: say who asks, and what for", param=field)
    return body


def _check_evidence(evidence: Json) -> None:
    """Raises BadRequestError naming the field."""
    try:
        msgspec.convert(evidence, Evidence)
    except msgspec.ValidationError as error:
        raise BadRequestError(
            f"evidence is not what `loraledger change replay` attaches: {error}",
            param=_named(str(error), "evidence"),
        ) from error


def _named(message: str, within: str = "") -> str | None:
    """The field that is wrong, by what ``msgspec`` says: the path, and the field that is missing there or too much."""
    path = re.findall(r"at `\$\.?([^`]*)`", message)
    field = re.findall(r"(?:required|unknown) field `([^`]*)`", message)
    return ".".join(part for part in (within, *path, *field) if part) or None
