"""The coordinator and what it owns: executors, gateways with their requests, the router between."""
