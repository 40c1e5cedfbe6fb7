"""The review of a week: what the record says of it beside the week before, and what to try next.

Theory of operation. ``gather`` asks the record through ``signals`` and puts the answers into one struct; ``tables`` says which of
its figures stand where; ``html`` and ``markdown`` write them down. No figure is worked out twice: what the page shows is what
``measure``, ``advise`` and ``diagnose`` found. ``triggers`` tells whether there is anything new to review.
"""

from loraledger.operate.review.gather import Asked, Changed, Names, Review, Worst, review
from loraledger.operate.review.html import page
from loraledger.operate.review.markdown import text
from loraledger.operate.review.pins import Pinned
from loraledger.operate.review.proposals import Proposal
from loraledger.operate.review.standing import Standing, standing
from loraledger.operate.review.triggers import Fresh

__all__ = [
    "Asked",
    "Changed",
    "Fresh",
    "Names",
    "Pinned",
    "Proposal",
    "Review",
    "Standing",
    "Worst",
    "page",
    "review",
    "standing",
    "text",
]
