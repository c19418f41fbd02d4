"""``pagewise doctor``: checks whether this machine can run Pagewise, and prints a text for a bug report."""
