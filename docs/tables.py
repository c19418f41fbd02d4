"""The tables of options, metrics, limits and messages in the documents, made from the code.

    python -m docs.tables [--check]

In a document everything between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` is written by this script. With
``--check`` nothing is written: it fails if a table is not what the code says.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from docs import limit_tables, metric_tables, option_tables, wire_tables

_DOCS = Path(__file__).parent
_WRITTEN = ("options", "metrics", "vllm-flags", "wire-protocol")
DOCUMENTS = (*(_DOCS / f"{name}.md" for name in _WRITTEN), _DOCS.parent / "SECURITY.md")


def options_table() -> str:
    """A table for each group of the help, and what ``pagewise serve`` has not."""
    parts = []
    for title, rows in option_tables.described():
        table = _table(("option", "of", "default", ""), rows)
        parts.append(f"**{title}**\n\n{table}" if title else table)
    return "\n\n".join(parts)


def metrics_table() -> str:
    """One table of all metrics."""
    return _table(("metric", "kind", "of", "meaning"), metric_tables.described())


def limits_table() -> str:
    """What is limited, for whom, and by how much."""
    return _table(("limit", "of", "default", "option"), limit_tables.described())


def vllm_table() -> str:
    """The options of ``vllm serve`` that have other names or no effect."""
    return _table(("vLLM's option", "here"), option_tables.of_vllm())


def wire_table(name: str) -> str:
    """Each message of a direction, or each part of messages, with a table of its fields."""
    parts = []
    for what, rows in wire_tables.described(name):
        heads = ("field", "type", "default", "meaning")
        parts += [what, _table(heads, rows)] if rows else [what]
    return "\n\n".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join([_row(*heads), "|" + "---|" * len(heads), *(_row(*row) for row in rows)])


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
