"""Pagewise on a Ray cluster: ``pagewise up``, ``down``, ``status`` and ``logs``.

Ray places and restarts actors. Each ``ProcessActor`` holds one Pagewise process as a child, and one ``Controller``
compares the running processes with the plan. Requests and tokens never go through Ray.
"""
