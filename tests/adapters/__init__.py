"""Tests of adapters on disk."""
