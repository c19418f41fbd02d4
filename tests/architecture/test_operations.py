"""The documents and ``compose.yaml`` know every option, every metric and every message."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.metrics import MEMORY_EVENTS
from pagewise_shared.config import VARIABLE_PREFIX, Option, options_of
from pagewise_shared.protocol import POOL_TIERS, Blocks, FromExecutor, FromScheduler, ReadBlocks
from pagewise_shared.protocol.gateway_messages import FromGateway, ToGateway

from docs import metric_tables, option_tables, tables, wire_tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMPOSE = (ROOT / "compose.yaml").read_text()
OPTIONS = {
    option.variable: option for config in option_tables.COMMANDS.values() for option in options_of(config).values()
}
METRICS = {metric.name: metric for metric in metric_tables.metrics()}


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_what_the_code_says(document: Path) -> None:
    assert document.read_text() == tables.written(document.read_text()), "run `make docs`"


def test_every_option_and_every_metric_is_in_a_table() -> None:
    text = (DOCS / "options.md").read_text()
    for option in OPTIONS.values():
        shown = option.variable if option.secret else "MODEL" if option.name == "model" else option.flag
        assert f"| `{shown}` |" in text
    text = (DOCS / "metrics.md").read_text()
    for name in METRICS:
        assert re.search(rf"^\| `{name}[`{{]", text, re.MULTILINE), name


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: str(option.name))
def test_every_option_says_what_it_is(option: Option) -> None:
    assert option.meta.get("text")


def test_every_metric_has_a_kind_a_meaning_and_its_labels() -> None:
    assert METRICS["kv_block_events_total"].values["event"] >= {"evicted", "fetch_failed"}
    assert METRICS["executor_kv_blocks"].labels == ["executor", "state"], "also without an executor"
    assert METRICS["key_tokens_total"].labels == ["key", "kind"], "also without a key"
    for metric in METRICS.values():
        assert metric.kind in ("gauge", "counter", "histogram"), metric
        assert metric.documentation, metric


@pytest.mark.parametrize("document", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.name)
def test_counters_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"`(?:pagewise_)?(\w+_total)[`{]", document.read_text()))
    assert named <= METRICS.keys()


def test_a_metric_is_counted_by_one_kind_of_process() -> None:
    """The scheduler adds gateways' counts up and shows them beside its own: twice the same name would count twice."""
    assert [metric.name for metric in METRICS.values() if len(metric.of) > 1] == []


def test_a_document_asks_for_tables_that_there_are() -> None:
    for text, message in (
        ("<!-- table: nothing --><!-- end of table -->", "no table 'nothing'"),
        ("<!-- table: options -->", "end"),
    ):
        with pytest.raises(ValueError, match=message):
            tables.written(text)


def test_every_message_and_every_part_of_one_is_in_a_table_once_with_its_fields() -> None:
    unions = (FromExecutor, FromScheduler, ReadBlocks | Blocks, FromGateway, ToGateway)
    messages = {struct.__name__ for union in unions for struct in get_args(union)}
    text = (ROOT / "docs/wire-protocol.md").read_text()
    described = re.findall(r"^\*\*`(\w+)`\*\*", text, re.MULTILINE)
    assert len(described) == len(set(described))
    assert messages < set(described)
    assert {"SamplingParams", "BlockCopies", "TokenLogprobs", "MetricSample"} < set(described)
    (row,) = re.findall(r"^\| `keeps_blocks` .*", text, re.MULTILINE)
    assert row.startswith("| `keeps_blocks` | bool | `false` | the inventory of the Hello with the number `hello`")


def test_fields_are_told_by_their_part_of_the_docstring() -> None:
    class Told(msgspec.Struct):
        """A struct. It has fields.

        Fields:
            first, second: of two kinds; 0: neither. third: a
                long one.
        """

        first: int
        second: int = 0
        third: tuple[int, ...] | None = None
        untold: bool = False

    what, meanings = wire_tables._docstring(Told)
    assert what == "A struct. It has fields."
    assert meanings == {
        "first": "of two kinds; 0: neither",
        "second": "of two kinds; 0: neither",
        "third": "a long one",
    }


def test_every_counter_of_the_memory_is_a_metric() -> None:
    fields = set(MemoryCounters.__slots__) - {"lower_evicted"}
    assert set(MEMORY_EVENTS) == fields | {f"{name}_evicted" for name in POOL_TIERS[1:]}


def test_compose_passes_on_nothing_but_options() -> None:
    ours = {"HTTP_HOST", "HTTP_PORT"}  # of the published port; inside, host and port are fixed
    named = set(re.findall(rf"{VARIABLE_PREFIX}(\w+)", COMPOSE))
    assert {VARIABLE_PREFIX + name for name in named - ours} <= OPTIONS.keys()
