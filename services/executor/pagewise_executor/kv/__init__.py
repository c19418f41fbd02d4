"""KV blocks: the device pool, the host tier beneath it, and the exchange of blocks with other executors."""
