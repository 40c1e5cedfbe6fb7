"""Traffic that is drawn, not recorded: published generators and plain popularities, from named seeds."""
