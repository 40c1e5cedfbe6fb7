"""``loraledger compare``: what is offered, on one trace."""

from loraledger.cli.compare.verb import compare

__all__ = ["compare"]
