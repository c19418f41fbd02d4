"""The pure core: memory and scheduling as plain data structures. No event loop, sockets or clock."""
