"""The tables of options, metrics, limits and messages in the documents, made from the code.

    python -m docs.tables [--check]

In a document everything between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` is written by this script. With
``--check`` nothing is written: it fails if a table is not what the code says.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct
from pagewise_shared.config import (
    ExecutorConfig,
    GatewayConfig,
    GatewaysConfig,
    Option,
    SchedulerConfig,
    ServeConfig,
    UpConfig,
    options_of,
    vllm,
)
from pagewise_shared.config.options import GROUPS
from prometheus_client import CollectorRegistry

from docs import wire_tables

_DOCS = Path(__file__).parent
_WRITTEN = ("options", "metrics", "vllm-flags", "wire-protocol")
DOCUMENTS = (*(_DOCS / f"{name}.md" for name in _WRITTEN), _DOCS.parent / "SECURITY.md")

COMMANDS: dict[str, type[Struct]] = {
    "serve": ServeConfig,
    "up": UpConfig,
    "gateways": GatewaysConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
}
"""The configuration of each command; the first three are of ``pagewise``, the others are ``pagewise-NAME``."""

METRIC_MODULES = {"scheduler": "pagewise_scheduler.metrics", "gateway": "pagewise_gateway.metrics"}
"""Where the class ``Metrics`` of each kind of process is, whose ``registry`` holds them."""

_QUEUE = "all together; with several API keys, up to twice as much and one request"

LIMITS = (
    ("requests of an API key at once", "", "key_concurrent"),
    ("requests of an API key per minute", "", "key_requests_per_minute"),
    ("tokens of an API key per minute, prompts and outputs", "", "key_tokens_per_minute"),
    ("lowest priority that an API key may ask for", "", "pagewise_gateway.http.credentials:LOWEST_PRIORITY"),
    ("API keys", "", "pagewise_gateway.http.credentials:MOST_KEYS"),
    ("HTTP connections", "each gateway", "max_connections"),
    ("seconds for the head of a request, or between two requests", "each connection", "keepalive_timeout"),
    ("seconds for the body of a request", "each request", "pagewise_gateway.http.parsing:BODY_SECONDS"),
    ("seconds between two parts of a body", "each request", "pagewise_gateway.http.parsing:PART_SECONDS"),
    ("seconds in which a client reads nothing", "each connection", "write_timeout"),
    (
        "bytes of a stream that are not read",
        "each request",
        "pagewise_gateway.scheduler_client.live_request:MOST_UNREAD",
    ),
    ("bytes of a body", "each request", "max_body_bytes"),
    ("bytes of bodies that are read or parsed", "each gateway; a quarter for each API key", "max_body_memory"),
    (
        "bytes of answers that are collected or written",
        "each gateway; a quarter for each API key, and for one answer",
        "max_answer_memory",
    ),
    ("arrays and objects of a body", "each request", "pagewise_gateway.http.parsing:MAX_CONTAINERS"),
    ("strings of a body", "each request", "pagewise_gateway.http.parsing:MAX_STRINGS"),
    ("values of a body", "each request", "pagewise_gateway.http.parsing:MAX_VALUES"),
    ("headers of a request", "each request", "pagewise_gateway.http.listening:MAX_HEADERS"),
    ("bytes of a first line, and of a header", "each request", "pagewise_gateway.http.listening:MAX_LINE"),
    (
        "seconds for which the rest of a refused body is read and thrown away",
        "each connection",
        "pagewise_gateway.http.parsing:LINGER_SECONDS",
    ),
    ("messages", "each request", "pagewise_gateway.http.schema:MAX_MESSAGES"),
    ("parts of a message", "each message", "pagewise_gateway.http.schema:MAX_CONTENT_PARTS"),
    ("tools", "each request", "pagewise_gateway.http.tools_schema:MAX_TOOLS"),
    ("tool calls", "each message", "pagewise_gateway.http.tools_schema:MAX_TOOL_CALLS"),
    ("bytes of `chat_template_kwargs`", "each request", "pagewise_gateway.http.schema:MAX_TEMPLATE_KWARGS_BYTES"),
    (
        "levels of `chat_template_kwargs`, and of a tool's schema",
        "each request",
        "pagewise_gateway.http.schema:MAX_TEMPLATE_KWARGS_DEPTH",
    ),
    ("characters of a text", "each token of the context", "pagewise_gateway.http.schema:CHARACTERS_PER_TOKEN"),
    ("stop strings", "each request", "pagewise_gateway.http.schema:MAX_STOP_STRINGS"),
    ("characters of a stop string or bad word", "each request", "pagewise_gateway.http.schema:MAX_STOP_CHARACTERS"),
    ("`stop_token_ids`", "each request", "pagewise_gateway.http.schema:MAX_STOP_TOKENS"),
    ("`bad_words`", "each request", "pagewise_gateway.http.schema:MAX_BAD_WORDS"),
    ("tokens of all `bad_words`", "each request", "pagewise_shared.sampling:MAX_BAD_TOKENS"),
    ("entries of `logit_bias`", "each request", "pagewise_shared.sampling:MAX_LOGIT_BIASES"),
    ("bytes of a grammar or JSON schema", "each request", "pagewise_shared.sampling:MAX_GRAMMAR_BYTES"),
    ("levels of a JSON schema", "each request", "pagewise_gateway.structured.walk:MAX_DEPTH"),
    (
        "levels of a JSON schema with what it refers to, or rules of a grammar",
        "each request",
        "pagewise_gateway.structured.schemas:MAX_LEVELS",
    ),
    ("rules of a grammar in GBNF", "each request", "pagewise_gateway.structured.grammars:MAX_GBNF_RULES"),
    (
        "characters of a grammar beside schemas",
        "each request",
        "pagewise_gateway.structured.grammars:MAX_GRAMMAR_CHARACTERS",
    ),
    ("symbols in the rules of a grammar", "each request", "pagewise_gateway.structured.grammars:MAX_GRAMMAR_SYMBOLS"),
    (
        "combinations of character classes that a text has to match together, times characters",
        "each string of a schema, each terminal",
        "pagewise_gateway.structured.conjunctions:MAX_WORK",
    ),
    ("seconds of a processor to compile a grammar", "each request", "pagewise_gateway.structured.checker:SECONDS"),
    (
        "bytes of memory of a process that compiles grammars",
        "each of two of a gateway",
        "pagewise_gateway.structured.checker:MEMORY_BYTES",
    ),
    (
        "grammars that wait to be compiled",
        "each API key of a gateway",
        "pagewise_gateway.structured.grammars:MAX_WAITING_GRAMMARS",
    ),
    ("characters of a `regex`", "each request", "pagewise_gateway.structured.grammars:MAX_REGEX_CHARACTERS"),
    (
        "optional properties of an object, alternatives of `anyOf`",
        "each schema",
        "pagewise_gateway.structured.schemas:MAX_OPTIONAL",
    ),
    ("characters of a text in `choice`, `enum` or `const`", "each", "pagewise_gateway.structured.schemas:MAX_TEXT"),
    ("texts of `choice`", "each request", "pagewise_gateway.http.schema:MAX_CHOICES"),
    ("structures of a `structural_tag`", "each request", "pagewise_gateway.http.schema:MAX_STRUCTURES"),
    ("characters of an error", "each response", "pagewise_gateway.http.errors:MAX_MESSAGE_CHARACTERS"),
    ("prompts", "each request", "pagewise_gateway.http.schema:MAX_PROMPTS"),
    ("outputs (`n`)", "each prompt", "max_n"),
    ("sequences", "each request", "pagewise_gateway.http.params:MAX_SEQUENCES"),
    (
        "beams, times the number of `stop_token_ids` plus 2",
        "each prompt",
        "pagewise_gateway.http.params:MAX_CANDIDATES",
    ),
    ("log-probabilities", "each token", "pagewise_shared.sampling:MAX_LOGPROBS"),
    ("characters of a client's `X-Request-Id`", "each request", "pagewise_gateway.http.context:MAX_CLIENT_REQUEST_ID"),
    ("entries of `/debug/requests/{id}`, unless for an operator", "", "pagewise_gateway.http.debug:MOST_OF_OWN"),
    (
        "hashes of earlier prompts, 8 bytes each ([why](docs/operations.md#repeated-text))",
        "each gateway",
        "pagewise_gateway.repeats:REMEMBERED_KEYS",
    ),
    (
        "tokens of prompts that wait to be searched for repeated text",
        "each gateway",
        "pagewise_gateway.repeats:MOST_WAITING_TOKENS",
    ),
    ("tokens of a sequence", "", "max_model_len"),
    ("waiting sequences", _QUEUE, "max_waiting"),
    ("prompt tokens that wait", _QUEUE, "max_waiting_tokens"),
    ("running sequences", "each executor", "max_num_seqs"),
    (
        "rows and KV blocks of an executor",
        "each API key, while several have requests there ([below](#shares-of-an-executor))",
        "text: an equal share",
    ),
    (
        "steps that a request waits for room before sequences of keys above their share are preempted for it",
        "each request that is next and whose key has less than its share",
        "pagewise_scheduler.core.features.fair_shares:PATIENCE_STEPS",
    ),
    (
        "output tokens of a sequence before it is preempted again for another key",
        "each sequence",
        "pagewise_scheduler.core.features.fair_shares:LEAST_PROGRESS",
    ),
    ("tokens of a step, at most", "each executor", "pagewise_shared.protocol.limits:MAX_BATCHED_TOKENS"),
    ("gateways", "", "pagewise_scheduler.server.gateways:MAX_GATEWAYS"),
    ("executors", "", "pagewise_scheduler.server.executor_checks:MAX_EXECUTORS"),
    ("bytes of a frame to the scheduler", "", "pagewise_shared.protocol.limits:MAX_FRAME_TO_SCHEDULER"),
    ("bytes of the result of a step", "each executor", "pagewise_shared.protocol.limits:MAX_STEP_RESULT_BYTES"),
    ("bytes of the objects that a frame becomes", "", "pagewise_shared.protocol.limits:MAX_DECODED_BYTES"),
    ("bytes of a frame from the scheduler", "", "pagewise_shared.protocol.limits:MAX_FRAME_FROM_SCHEDULER"),
    ("bytes of a request on its way to the scheduler", "", "pagewise_shared.protocol.limits:MAX_SUBMIT_BYTES"),
    ("seconds without a heartbeat", "each executor", "executor_timeout"),
    ("seconds without a heartbeat", "each gateway", "gateway_timeout"),
    ("seconds without an executor", "each request", "placement_timeout"),
    ("seconds of a step", "each executor", "step_timeout"),
)
"""What is limited, for whom, and where the limit stands: an option of a service, a constant (``module:NAME``), or
``text:`` and the limit in words."""

_ALL = "all"
_PREFIX = "pagewise_"
_OF_EVERY_METRIC = ("model_name",)
_UNTOLD_VALUES = ("version", "le", "executor", "gateway", "key")
"""Labels whose values are names that people give, or numbers."""


def options_table() -> str:
    """A table for each group of the help, and what ``pagewise serve`` has not."""
    kinds = [(option, commands) for option, commands in _options()]
    titles = {name: title for title, names in GROUPS.items() for name in names}
    parts = []
    for title in ("", *GROUPS):
        rows = [
            _row(f"`{_shown(option)}`", ", ".join(commands), _default(option), _meaning(option))
            for option, commands in kinds
            if titles.get(option.name, "API keys" if option.secret else "") == title
        ]
        head = _table(("option", "of", "default", ""), rows)
        parts.append(f"**{title}**\n\n{head}" if title else head)
    return "\n\n".join(parts)


def _options() -> Iterator[tuple[Option, list[str]]]:
    """Each option with the commands that have it, in the order of the help."""
    order = [name for names in GROUPS.values() for name in names]
    found: list[tuple[Option, list[str]]] = []
    for command, config in COMMANDS.items():
        for option in options_of(config).values():
            for known, commands in found:
                if known == option:
                    commands.append(command)
                    break
            else:
                found.append((option, [command]))
    for option, commands in sorted(found, key=lambda one: order.index(one[0].name) if one[0].name in order else -1):
        yield option, [_ALL] if len(commands) == len(COMMANDS) else commands


def _shown(option: Option) -> str:
    if option.secret:
        return option.variable
    return "MODEL" if option.name == "model" else option.flag


def _default(option: Option) -> str:
    """Its default, and what else it may be if that is one of a few words."""
    base = option.hint
    while get_args(base) and get_origin(base) is not Literal:
        base = get_args(base)[0]
    if get_origin(base) is Literal:
        others = [choice for choice in get_args(base) if choice != option.default]
        default = "none" if option.default is None else f"`{option.default}`"
        return f"{default} (or {', '.join(others)})"
    told = re.search(r"\(default: (.+)\)$", str(option.meta.get("text", "")))
    if told:
        return told[1]
    if option.default is None:
        return ""
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


def _meaning(option: Option) -> str:
    text = re.sub(r" \(default: .+\)$", "", str(option.meta.get("text", "")))
    more = option.meta.get("more")
    return f"{text}. {more}" if more else text


@dataclass
class Metric:
    """One metric, as documents tell of it. ``of``: kinds of process that count it; ``values``: known ones, by label."""

    name: str
    kind: str
    documentation: str
    labels: list[str]
    values: dict[str, set[str]] = field(default_factory=dict)
    of: list[str] = field(default_factory=list)


def metrics_table() -> str:
    """One table of all metrics, in the order in which processes register them."""
    rows = []
    for metric in metrics():
        labels = ",".join(metric.labels)
        values = [
            (f"{label}: " if len(metric.values) > 1 else "") + ", ".join(sorted(known))
            for label, known in metric.values.items()
        ]
        meaning = metric.documentation.rstrip(".") + "".join(f"; {one}" for one in values)
        name = f"`{metric.name}{{{labels}}}`" if labels else f"`{metric.name}`"
        rows.append(_row(name, metric.kind, ", ".join(metric.of), meaning))
    return _table(("metric", "kind", "of", "meaning"), rows)


def metrics() -> list[Metric]:
    """Every metric of Pagewise, of those services that are installed."""
    found: dict[str, Metric] = {}
    for process, module in METRIC_MODULES.items():
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        made = importlib.import_module(module).Metrics
        required = len(inspect.signature(made).parameters)
        for metric in _registered(made(*["m"] * required).registry):
            found.setdefault(metric.name, metric).of.append(process)
    return list(found.values())


def _registered(registry: CollectorRegistry) -> Iterator[Metric]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if not family.name.startswith(_PREFIX):
                continue
            # A collector of the library knows the labels of what has no samples yet, ours put them into the family.
            named: Any = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            labels = [str(label) for label in named if label not in _OF_EVERY_METRIC]
            values: dict[str, set[str]] = {}
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label in labels and label not in _UNTOLD_VALUES:
                        values.setdefault(label, set()).add(value)
            name = family.name.removeprefix(_PREFIX) + ("_total" if family.type == "counter" else "")
            yield Metric(name, family.type, family.documentation, labels, values)


def limits_table() -> str:
    """What is limited, with the defaults of the options and the constants that limit it."""
    options = {option.name: option for option, _ in _options()}
    rows = []
    for what, whose, source in LIMITS:
        module, _, constant = source.partition(":")
        if module == "text":
            value, set_by = constant.strip(), ""
        elif constant:
            number = getattr(importlib.import_module(module), constant)
            value, set_by = f"{number:,g}" if isinstance(number, float) else f"{number:,}", ""
        else:
            default = options[source].default
            value = f"{default:,g}" if isinstance(default, float) else f"{default:,}" if default is not None else ""
            value, set_by = value or _default(options[source]), f"`{options[source].flag}`"
        rows.append(_row(what, whose, value, set_by))
    return _table(("limit", "of", "default", "option"), rows)


def vllm_table() -> str:
    """The options of ``vllm serve`` that are accepted under another name, or without an effect."""
    options = options_of(ServeConfig)
    same = {option.flag for option in options.values()}
    rows = []
    for name, (option_name, _) in vllm.ALIASES.items():
        if name not in same:
            option = options[option_name]
            rows.append(_row(f"`{name}`", f"`{option.variable if option.secret else option.flag}`"))
    rows += [_row(f"`{name}`", "always on") for name in sorted(vllm.ALWAYS)]
    for name, accepted in vllm.ONLY.items():
        rows.append(_row(f"`{name}`", "only " + ", ".join(f"`{each}`" for each in accepted)))
    return _table(("vLLM's option", "here"), rows)


def wire_table(name: str) -> str:
    """Each message of a direction, or each part of messages, with a table of its fields."""
    parts = []
    for what, rows in wire_tables.described(name):
        heads = ("field", "type", "default", "meaning")
        parts += [what, _table(heads, [_row(*row) for row in rows])] if rows else [what]
    return "\n\n".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([_row(*heads), "|" + "---|" * len(heads), *rows])


TABLES: dict[str, Callable[[], str]] = {
    **{f"wire_{name}": partial(wire_table, name) for name in (*wire_tables.DIRECTIONS, "parts")},
    "options": options_table,
    "metrics": metrics_table,
    "limits": limits_table,
    "vllm": vllm_table,
}


def written(text: str) -> str:
    """A document with its tables made anew.

    Raises:
        ValueError: it asks for a table that nobody makes, or does not say where one ends.
    """

    def table(match: "re.Match[str]") -> str:
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}, only {', '.join(TABLES)}")
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[3]}"

    begin, end = r"(<!-- table: (\w+) -->)", "(<!-- end of table -->)"
    if len(re.findall(begin, text)) != len(re.findall(end, text)):
        raise ValueError("a table begins that does not end")
    return re.sub(f"{begin}.*?{end}", table, text, flags=re.DOTALL)


def main() -> int:
    """Write the tables anew, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a table is out of date")
    check: Any = parser.parse_args().check
    stale = [path for path in DOCUMENTS if written(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.name} has tables that are not what the code says" + ("" if check else ": written anew"))
        if not check:
            path.write_text(written(path.read_text()))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
