"""The coordinator and what it owns: executors with their engines, gateways with their requests, the router between."""
