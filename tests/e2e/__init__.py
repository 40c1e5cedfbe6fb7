"""The whole product as processes: a gateway, emulated replicas, and the clients that people really use."""
