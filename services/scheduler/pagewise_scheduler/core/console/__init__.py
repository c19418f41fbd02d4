"""The views of consoles: plain data of bounded size, made from the present state of the core in bounded time."""
