"""How long to fuzz: seconds in the suite, as long as wanted by ``make fuzz``."""

import os

from hypothesis import HealthCheck, settings

EFFORT = int(os.environ.get("FUZZ_EFFORT", "1"))
"""How many times as many examples, and seconds, as in the suite."""


def examples(count: int) -> settings:
    """Settings of a test that tries ``count`` examples in the suite."""
    return settings(max_examples=count * EFFORT, deadline=None, suppress_health_check=list(HealthCheck))
