"""``loraledger change``: one variable at a time, from a proposal to a fleet that has it or is as before.

What goes live goes through the running gateway, which keeps the journal and does the watching; these verbs ask it. What only reads
(``list``, ``show``, ``diff``) takes the journal itself where no gateway answers, and says which of both it was.
"""

from __future__ import annotations

import typer

from loraledger.cli.change.acting import rollback, rollout, withdraw
from loraledger.cli.change.proposing import propose
from loraledger.cli.change.reading import diff, list_, show
from loraledger.cli.change.replaying import replay
from loraledger.cli.change.watching import watch

app = typer.Typer(
    help="Change one variable: propose, replay, roll out to a part, watch; accepted, or taken back by itself.",
    no_args_is_help=True,
)
app.command("propose")(propose)
app.command("replay")(replay)
app.command("rollout")(rollout)
app.command("watch")(watch)
app.command("rollback")(rollback)
app.command("withdraw")(withdraw)
app.command("list")(list_)
app.command("show")(show)
app.command("diff")(diff)
