"""``loraledger signals``, ``diagnose``, ``advise`` and ``query``: the record, asked.

Theory of operation. The verbs print what ``loraledger.signals`` found and find nothing themselves. Each struct goes into ``--json``
as it is, with the figures that it computes (``document``); the tables show the part that decides something, and end in what is
missing. Every verb works on a record without a gateway: live, copied, imported or replayed.
"""

from loraledger.cli.signals.advise import advise
from loraledger.cli.signals.diagnose import diagnose
from loraledger.cli.signals.query import query
from loraledger.cli.signals.signals import signals

__all__ = ["advise", "diagnose", "query", "signals"]
