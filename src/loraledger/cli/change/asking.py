"""How the verbs of ``loraledger change`` ask the gateway, and what its refusals are on the command line.

What a field of a proposal is called is not what its option is called, so a refusal names the option.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import typer

from loraledger.cli.ask import send
from loraledger.cli.output import printable
from loraledger.errors import ObjectiveError, TargetError

OPTIONS: Final = {
    "variable": "VARIABLE",
    "before": "--from",
    "after": "--to",
    "target": "--target",
    "guardrails": "--guard",
    "share": "--share",
    "window_ns": "--within",
    "block_ns": "--block",
    "who": "--who",
    "why": "--why",
}
"""Fields of bodies, and the options that they come from."""


def ask_changes(
    method: Literal["GET", "POST"], path: str, config: Path | None, body: object = None, timeout_s: float = 30.0
) -> dict[str, Any]:
    """The answer to ``method`` on ``/api/changes{path}``.

    Raises ``TargetError`` when no gateway answers there or its disk refuses the step, ``ObjectiveError`` for what it will not do
    now (409); what it could not read, and a change that it does not have, are usage errors.
    """
    reply = send(method, f"changes{path}", config, timeout_s, body)
    url = reply.request.url
    try:
        found = reply.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TargetError(f"{url} is not a gateway's control plane: correct control.port")
    if reply.is_success:
        return found
    said = found.get("error")
    message = said.get("message") if isinstance(said, dict) else None
    if not isinstance(message, str) or reply.status_code not in (400, 404, 409, 503):
        raise TargetError(f"{url} answered {reply.status_code}: {reply.text[:300]}")
    if reply.status_code == 503:
        raise TargetError(message)
    if reply.status_code == 409:
        raise ObjectiveError(message)
    param = said.get("param") if isinstance(said, dict) else None
    option = OPTIONS.get(str(param).partition(".")[0].partition("[")[0])
    print(f"loraledger: {f'{option}: ' if option else ''}{printable(message)}", file=sys.stderr)
    raise typer.Exit(2)


def path_of(id_: str, verb: str = "") -> str:
    """The path of one change, and of what is to be done with it."""
    return f"/{quote(id_, safe='')}" + (f"/{verb}" if verb else "")
