"""``loraledger verify``: does the journal's every answer follow from its events?"""

from __future__ import annotations

from loraledger.cli.options import ConfigOption, JsonOption, RecordOption, record_directory
from loraledger.cli.output import print_json
from loraledger.errors import ObjectiveError


def verify(record: RecordOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Step a fresh kernel through the journal and compare each command with the journalled one, byte for byte. Exit code 5
    when one differs."""
    import msgspec

    from loraledger.conductor.reading import verify as run

    found = run(record_directory(record, config))
    if as_json:
        print_json("verification", msgspec.to_builtins(found))
    else:
        print(
            f"{found.steps} steps with {found.commands} commands in {found.segments} segments not compacted yet: "
            + ("identical" if found.difference is None else "DIFFERENT")
            + (f" ({found.unanswered} events had no answer yet)" if found.unanswered else "")
            + (f" ({found.headless} segments without a head passed over)" if found.headless else "")
            + (f" ({found.torn} segments end in bytes that cannot be read)" if found.torn else "")
        )
    if found.difference is not None:
        first = found.difference
        raise ObjectiveError(
            f"{first.segment} at {first.offset}: {first.event}\n  journalled: {first.journalled}\n  replayed:   {first.replayed}"
        )
