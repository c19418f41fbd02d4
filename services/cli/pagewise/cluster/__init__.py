"""Pagewise on a Ray cluster: ``pagewise up``, ``down``, ``status`` and ``logs``.

Ray places and restarts actors. Each of ours, a ``ProcessActor``, holds one of our processes as a child, and one more,
the ``Controller``, compares what runs with what should. Requests and tokens never go through Ray.
"""
