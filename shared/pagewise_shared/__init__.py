"""Types, wire protocol and configuration that both services share."""
