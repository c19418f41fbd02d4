"""Storage outside of executors that KV blocks outlive them in."""
