"""Runs a machine of hypothesis, whose rules are operations on a scheduler and whose invariants hold between them."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def check_rules(machine: type[RuleBasedStateMachine], examples: int, *, steps: int = 100) -> None:
    """Find no example, out of ``examples`` of up to ``steps`` operations each, that breaks an invariant."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]
