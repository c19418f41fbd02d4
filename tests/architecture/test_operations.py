"""``docs/operations.md`` and ``compose.yaml`` know every option and every metric."""

import re
from pathlib import Path

import pytest
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.metrics import MEMORY_EVENTS, Metrics
from pagewise_shared.config import VARIABLE_PREFIX, ExecutorConfig, SchedulerConfig, ServeConfig, secrets

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
OPTIONS = sorted({name for kind in (SchedulerConfig, ExecutorConfig, ServeConfig) for name in kind.__struct_fields__})


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "model"])
def test_every_option_is_explained(option: str) -> None:
    shown = VARIABLE_PREFIX + option.upper() if option in secrets(SchedulerConfig) else f"--{option.replace('_', '-')}"
    assert f"`{shown}`" in OPERATIONS


def test_every_metric_is_explained() -> None:
    exposed = re.findall(r"^# TYPE pagewise_(\w+)", Metrics("m").render().decode(), re.MULTILINE)
    assert exposed
    assert [name for name in exposed if not re.search(rf"`(pagewise_)?{name}[`{{]", OPERATIONS)] == []


def test_every_value_of_a_label_is_explained_beside_its_metric() -> None:
    """Those that are known when a scheduler starts: all but names that keys and executors were given."""
    metrics = Metrics("m")
    seen = {
        (family.name.removeprefix("pagewise_"), value)
        for family in metrics.registry.collect()
        if family.name.startswith("pagewise_")
        for sample in family.samples
        for label, value in sample.labels.items()
        if label not in ("model_name", "version", "le")
    }
    assert ("kv_block_events", "fetch_failed") in seen
    rows = {
        name: row
        for row in OPERATIONS.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+?)(?:_total)?[`{]", row.split("|")[1])
    }
    assert [(name, value) for name, value in sorted(seen) if not re.search(rf"\b{value}\b", rows[name])] == []


def test_every_counter_of_the_memory_is_a_metric() -> None:
    assert set(MEMORY_EVENTS) == set(MemoryCounters.__slots__)


def test_compose_passes_on_nothing_but_options() -> None:
    ours = {"HTTP_HOST", "HTTP_PORT"}  # of the published port; inside, host and port are fixed
    named = set(re.findall(rf"{VARIABLE_PREFIX}(\w+)", (ROOT / "compose.yaml").read_text()))
    assert named - ours <= {name.upper() for name in OPTIONS}
