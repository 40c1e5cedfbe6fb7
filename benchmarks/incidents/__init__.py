"""Incidents recorded on virtual replicas, for whoever has to find out what was wrong; written before any diagnosis, apart from it.

Eleven kinds. Of each, a fleet, its traffic and the incident are drawn from stated ranges (``draws``) by a seed; the live kernel
runs in front of twins (``play``); and the twins' own books say if the baseline was calm and the incident took place (``truth``).
"""
