"""The executor service: holds the KV pool and runs step plans."""
