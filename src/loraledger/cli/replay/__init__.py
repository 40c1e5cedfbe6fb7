"""``loraledger replay``: try it on your own traffic first."""

from loraledger.cli.replay.verb import replay

__all__ = ["replay"]
