"""The coordinator and its parts: executors, gateways with their requests, the router between."""
