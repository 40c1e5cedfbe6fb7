"""Our own record as a trace: what arrived at the gateway, told by the ``requests`` table.

Theory of operation. Arrival, tenant, adapter and tokens are taken, and nothing else: a record holds no prompt. Everything that
arrived is demand, whatever became of it, except what the client got wrong (``client_error``). Requests that were refused,
failed or cut off have no counts by the engine; what stands in for these is named by the operator:

* ``refuse``: the import stops at the first one;
* ``drop``: they are left out and counted;
* ``estimate``: for the prompt the gateway's own estimate, else the median of the adapter, else of all; for the output the
  median of the adapter, else of all. How many were filled is said.

Rows are read a page at a time, in order of arrival and id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final, Literal

import msgspec

from loraledger.errors import InputFileError
from loraledger.record.frames import segments
from loraledger.record.lines import BadRows
from loraledger.record.reader import RecordReader
from loraledger.record.tables import TABLES
from loraledger.replay.traces.trace import MAX_ADAPTERS, Adapter, Request
from loraledger.replay.workloads.generate import Rows

Unknown = Literal["refuse", "drop", "estimate"]

_PAGE: Final = 20_000
_LOOKED_AT: Final = 10_000
"""Paths below a folder that is no record, among which one is looked for."""
_UNCOMPUTED: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Paths whose calls need the engine's tokenizer and not its model."""
_DEMAND: Final = f"status IS DISTINCT FROM 'client_error' AND coalesce(path, '') NOT IN {_UNCOMPUTED}"
_COLUMNS: Final = (
    "arrived_ns, coalesce(id, '') AS id, coalesce(tenant, 'unknown') AS tenant, adapter, "
    "prompt_tokens, predicted_prompt_tokens, "
    "CASE WHEN path = '/v1/embeddings' THEN 1 ELSE generated_tokens END AS generated_tokens"  # one step, as for one token
)


class _Seen(msgspec.Struct, frozen=True, gc=False):
    arrived_ns: int
    id: str
    tenant: str
    adapter: str | None
    prompt_tokens: int | None
    generated_tokens: int | None
    predicted_prompt_tokens: int | None


def recorded_adapters(reader: RecordReader) -> tuple[Adapter, ...]:
    """Every adapter that a request names, in order of name. A record knows neither rank nor bytes of its files."""
    found = reader.query(
        f"FROM requests SELECT DISTINCT adapter WHERE adapter IS NOT NULL AND {_DEMAND} "
        f"ORDER BY adapter LIMIT {MAX_ADAPTERS + 1}"
    )
    return tuple(Adapter(str(row["adapter"])) for row in found)


def check_folder(folder: Path) -> None:
    """Raises ``InputFileError`` for a folder that is no record but has some in it, one or two levels down: a run keeps its own
    in ``record/``, and a sweep its runs beside each other."""
    try:
        if _is_record(folder):
            return
        below = islice(chain(folder.glob("*"), folder.glob("*/*")), _LOOKED_AT)
        found = sorted(path for path in below if not _hidden(path, folder) and _is_record(path))
    except (OSError, ValueError):  # no such folder, or one that may not be read: whoever opens it says so
        return
    if len(found) == 1:
        raise InputFileError(f"{folder}: not a record, but there is one in it: give {found[0]}")
    if found:
        raise InputFileError(
            f"{folder}: not a record, but there are {len(found):,} in it: give one of them, such as {found[0]}"
        )


def _is_record(folder: Path) -> bool:
    return any((folder / table).is_dir() for table in TABLES) or bool(segments(folder))


def _hidden(path: Path, above: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(above).parts)


class Recorded:
    """The requests of a record, in order; the first one is at 0. ``filled`` counts, for the latest pass, what was estimated."""

    def __init__(self, reader: RecordReader, bad: BadRows, unknown: Unknown = "refuse") -> None:
        self.filled: Counter[str] = Counter()
        self._reader = reader
        self._bad = bad
        self._unknown = unknown
        self._prompts, self._outputs = _medians(reader) if unknown == "estimate" else ({}, {})

    def __iter__(self) -> Rows:
        self.filled.clear()
        first: int | None = None
        for number, seen in enumerate(self._seen(), 1):
            first = seen.arrived_ns if first is None else first
            known = self._known(seen)
            if known is None:
                self._lacking(number, seen.id)
                continue
            yield number, Request(seen.arrived_ns - first, seen.tenant, seen.adapter, *known)

    def _known(self, seen: _Seen) -> tuple[int, int] | None:
        prompt, output = seen.prompt_tokens, seen.generated_tokens
        if self._unknown == "estimate":
            if prompt is None:
                prompt = seen.predicted_prompt_tokens or self._prompts.get(seen.adapter) or self._prompts.get("")
                self.filled["prompt_tokens"] += prompt is not None
            if output is None:
                output = self._outputs.get(seen.adapter) or self._outputs.get("")
                self.filled["generated_tokens"] += output is not None
        return None if prompt is None or output is None else (prompt, output)

    def _lacking(self, number: int, request_id: str) -> None:
        if self._unknown == "refuse":
            raise InputFileError(
                f"{self._bad.file}: request {request_id}: no token counts, as of one that was refused, failed or is still open: "
                "--unknown drop leaves such requests out, --unknown estimate fills them in"
            )
        self._bad.dropped["no token counts"] += 1

    def _seen(self) -> Iterator[_Seen]:
        after: list[object] = [-(2**63), ""]
        while True:
            page = self._reader.query(
                f"FROM requests SELECT {_COLUMNS} WHERE {_DEMAND} AND (arrived_ns, coalesce(id, '')) > (?, ?) "
                f"ORDER BY arrived_ns, id LIMIT {_PAGE}",
                after,
            )
            for row in page:
                yield msgspec.convert(row, _Seen)
            if len(page) < _PAGE:
                return
            after = [page[-1]["arrived_ns"], page[-1]["id"]]


def _medians(reader: RecordReader) -> tuple[dict[str | None, int], dict[str | None, int]]:
    """Median prompt and output of each adapter (``None``: base); under "" of all."""
    found = reader.query(
        "FROM requests SELECT adapter, GROUPING(adapter) AS every, round(median(prompt_tokens))::BIGINT AS prompt, "
        "round(median(generated_tokens) FILTER (status = 'ok'))::BIGINT AS output "
        f"WHERE {_DEMAND} GROUP BY ROLLUP (adapter)"
    )
    prompts: dict[str | None, int] = {}
    outputs: dict[str | None, int] = {}
    for row in found:
        name = "" if row["every"] else row["adapter"]
        for into, value in ((prompts, row["prompt"]), (outputs, row["output"])):
            if isinstance(value, int) and value > 0 and (name is None or isinstance(name, str)):
                into[name] = value
    return prompts, outputs
