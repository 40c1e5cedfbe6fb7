"""Fuzzing of the readers that see tenants' files."""
