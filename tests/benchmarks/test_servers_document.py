"""What the document says of other servers is what was measured."""

import json
from pathlib import Path

from benchmarks.servers.run import table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "servers-cpu.json"


def test_the_document_has_the_table_of_the_record() -> None:
    assert table(json.loads(RECORD.read_text())) in (ROOT / "docs" / "bench.md").read_text()
