"""Which executor a request goes to: what each holds of it, what waits there before it, and what it would push out."""
