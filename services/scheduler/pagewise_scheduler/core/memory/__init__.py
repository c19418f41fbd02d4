"""KV memory: block pool, block tables, KV cache manager."""
