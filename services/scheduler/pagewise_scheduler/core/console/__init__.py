"""What consoles show: plain data of bounded size, made from the core as it is now, in bounded time."""
