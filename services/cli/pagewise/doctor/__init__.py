"""``pagewise doctor``: whether this machine can run Pagewise, and what to paste into a bug report."""
