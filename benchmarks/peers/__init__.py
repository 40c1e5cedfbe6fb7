"""Other proxies that stand in front of engines: how each is installed, configured and started on this machine."""
