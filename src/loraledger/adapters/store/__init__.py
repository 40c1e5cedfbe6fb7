"""The gateway's own copies of adapters, by content."""
