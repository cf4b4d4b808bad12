"""HTTP handlers, one module for each resource. They hold no state: it is in `GatewayState`."""
