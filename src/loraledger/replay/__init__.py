"""The kernel on a virtual clock in front of a fleet of twins."""
