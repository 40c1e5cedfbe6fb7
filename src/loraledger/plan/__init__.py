"""What to run on: GPUs, offers, what a base and its adapters leave of them, and the need that a record shows.

Theory of operation. ``hardware`` is the catalogue, ``offers`` what can be had, ``candidates`` an offer with its floor taken off,
``scaling`` a measured twin profile carried over to another GPU, ``peak`` and ``requirement`` the need of a record. Nothing here
asks a market or a cloud: an offer comes in a file, with a date.
"""
