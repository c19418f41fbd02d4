"""The dashboard and the alert rules without a Prometheus; ``tests/observability`` has the tests with one."""

import re

from tests.deploy.dashboard import DASHBOARD, PANELS, ROOT, RULES, VARIABLES


def documented() -> dict[str, tuple[str, set[str]]]:
    """The kind and the labels of each metric in the table of docs/metrics.md."""
    found = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    return {name: (kind, set(labels.split(","))) for name, labels, kind in found}


def unknown_metrics(expression: str) -> set[str]:
    """The metrics of an expression that Pagewise does not have, or not as a histogram."""
    known = documented()
    unknown = set()
    for name in re.findall(r"\bpagewise_(\w+)", expression):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if name not in known and known.get(family, ("",))[0] != "histogram":
            unknown.add(name)
    return unknown


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_panels_and_rules_ask_for_metrics_that_there_are() -> None:
    for expression in [*expressions(), *(rule["expr"] for rule in RULES)]:
        assert unknown_metrics(expression) == set(), expression


def test_panels_and_rules_ask_for_labels_that_there_are() -> None:
    for expression in [*expressions(), *(rule["expr"] for rule in RULES)]:
        for metric, matchers in re.findall(r"\bpagewise_(\w+)\{([^}]*)\}", expression):
            kind, labels = documented()[re.sub(r"_(bucket|sum|count)$", "", metric)]
            asked = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", matchers))
            assert asked <= labels | {"instance", "job", "model_name"}, (metric, kind)


def test_every_panel_can_be_read_and_chosen_by_instance_and_model() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]
            if "pagewise_" in target["expr"]:
                assert target["expr"].count("pagewise_") == target["expr"].count('model_name=~"$model"')
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert set(VARIABLES) == {"datasource", "job", "instance", "model"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_covers_what_operators_watch() -> None:
    asked = " ".join(expressions())
    for metric in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "generation_tokens_total", "num_requests_waiting",
        "kv_blocks", "cached_tokens_total", "kv_block_events_total", "num_preemptions_total", "executors_ready",
        "placement_actual_ratio", "gateway_resident_memory_bytes",
    ):  # fmt: skip
        assert f"pagewise_{metric}" in asked


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
