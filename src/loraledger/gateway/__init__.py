"""The data plane (bytes) and the control plane (API) on top of the conductor."""
