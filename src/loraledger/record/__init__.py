"""The record: a write-ahead journal of frames, and the Parquet tables that are folded from it.

Nothing is re-exported here, so that a process which only appends frames does not pay for importing DuckDB.
"""
