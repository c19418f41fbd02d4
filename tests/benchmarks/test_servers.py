"""What the comparison with other servers writes into a document."""

from pathlib import Path

from benchmarks.servers.run import put_into, table


def test_a_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    document = tmp_path / "bench.md"
    document.write_text("before\n<!-- benchmarks.servers -->\n<!-- /benchmarks.servers -->\nafter\n")
    for text in ("first", "second"):
        put_into(document, text)
    assert document.read_text() == (
        "before\n<!-- benchmarks.servers -->\nsecond\n<!-- /benchmarks.servers -->\nafter\n"
    )


def test_ratios_that_rounds_do_not_agree_on_are_marked() -> None:
    ratios = {
        "request_throughput": {"median": 1.5, "differs": True},
        "output_throughput": {"median": 0.98, "differs": False},
    }
    medians = {"request_throughput": 2.0, "output_throughput": 1234.0, "cached_share": 0.5}
    servers = [{"name": "ours", "medians": medians}, {"name": "other", "medians": medians, "first_over_this": ratios}]
    settings = {"dataset_name": "random", "rounds": 6, "duration": 2.5, "max_concurrency": 4}
    record = {
        "commit": "abc",
        "machine": {"cores": 2},
        "load_average": 0.1,
        "versions": {"transformers": "5"},
        "results": [{"settings": settings, "servers": servers}],
    }
    text = table(record)
    assert "| random | ours | other |" in text
    assert "| requests/s | 2.00 | 2.00 (1.50\u00d7) |" in text
    assert "| output tokens/s | 1,234.0 | 1,234.0 (~0.98\u00d7) |" in text
    assert "| TTFT median, ms | not told | not told |" in text
    assert "6 rounds of 2.5 s, 4 requests or sessions at once" in text
