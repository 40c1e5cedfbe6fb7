"""``loraledger``: the verbs, and how errors leave the process.

Each verb lives in a file of its own and imports what is heavy when it runs, so that ``--help`` and completion stay quick. Data goes
to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, 2 usage, 3 bad config or input file, 4 target unreachable,
5 check or objective not met.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from loraledger import __version__
from loraledger.cli import (
    adapters,
    budget,
    calibrate,
    change,
    check,
    compare,
    config,
    emulate,
    explain,
    get,
    hardware,
    ledger,
    record,
    replay,
    requirement,
    review,
    serve,
    signals,
    trace,
    verify,
)
from loraledger.cli.demo import demo
from loraledger.errors import LedgerError

app = typer.Typer(
    name="loraledger",
    help="Run a multi-tenant LoRA endpoint as three capacity problems: base floor, adapter residency, KV cache.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 bad config or input file, 4 target unreachable, 5 check not met.",
)
app.command("serve")(serve.serve)
app.command("check")(check.check)
app.command("demo")(demo)
app.add_typer(get.app, name="get")
app.command("explain")(explain.explain)
app.command("signals")(signals.signals)
app.command("diagnose")(signals.diagnose)
app.command("advise")(signals.advise)
app.command("query")(signals.query)
app.command("verify")(verify.verify)
app.add_typer(adapters.app, name="adapters")
app.add_typer(record.app, name="record")
app.add_typer(trace.app, name="trace")
app.command("replay")(replay.replay)
app.command("compare")(compare.compare)
app.command("calibrate")(calibrate.calibrate)
app.command("budget")(budget.budget)
app.command("ledger")(ledger.ledger)
app.command("hardware")(hardware.hardware)
app.command("requirement")(requirement.requirement)
app.add_typer(change.app, name="change")
app.command("review")(review.review)
app.add_typer(config.app, name="config")
app.command("emulate")(emulate.emulate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"loraledger {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: run a verb; a ``LedgerError`` becomes one line on stderr and its exit code.

    The library ends the process itself on Ctrl-C (130) and, without a word, when whoever read the output left (1).
    """
    try:
        app()
    except LedgerError as error:
        print(f"loraledger: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"loraledger: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
