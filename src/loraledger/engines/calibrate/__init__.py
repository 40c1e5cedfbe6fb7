"""Measures one engine over its own API until a twin of it can be built: `loraledger calibrate`."""
