"""The dashboard and the alert rules with a real Prometheus, which scrapes a real server under load."""

import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.processes import Served, free_port, serving, spawn
from tests.deploy.dashboard import FOLDER, PANELS, RULES, VARIABLES

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
KEY = "sk-operator"

pytestmark = [pytest.mark.observability, pytest.mark.timeout(300)]


def test_promtool_and_prometheus_are_there() -> None:
    assert PROMTOOL, "promtool is missing: apt install prometheus"
    assert PROMETHEUS, "prometheus is missing: apt install prometheus"


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_takes_the_files(arguments: tuple[str, ...]) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


class Prometheus:
    """A Prometheus that scrapes one gateway every half a second, with our rules."""

    def __init__(self, folder: Path, target: str) -> None:
        assert PROMETHEUS
        settings: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(FOLDER / "alerts.yml")]
        (job,) = settings["scrape_configs"]
        job["static_configs"] = [{"targets": [target]}]
        key = folder / "key"
        key.write_text(KEY)
        job["authorization"] = {"credentials_file": str(key)}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(settings))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self.process = spawn(
            [
                PROMETHEUS, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def values(self, expression: str) -> list[float]:
        """The present values of an expression, except NaN."""
        found = [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]
        return [value for value in found if value == value]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


def filled_in(expression: str) -> str:
    """An expression as Grafana asks it, when everything is chosen."""
    return (
        expression.replace("$__rate_interval", "20s")
        .replace("$instance", ".*")
        .replace("$model", ".*")
        .replace("$job", ".*")
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # A pool that is too small for the load: sequences are preempted, blocks are demoted, and come back.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWISE_API_KEYS", f"ops: {KEY} operator=yes")
        with serving(
            "--num-blocks=60", "--max-num-seqs=16", "--host-memory=16MiB", "--recovery=swap", "--executors=2"
        ) as running:
            yield running


@pytest.fixture(scope="module")
def prometheus(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    made = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def load(server: Served) -> Iterator[None]:
    """A few clients whose prompts share prefixes, until the tests have ended."""
    done = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not done.is_set():
            number += 1
            text = f"def function_{(client + number) % 9}(argument):\n" * 12
            body = {"model": "pagewise-demo", "prompt": text, "max_tokens": 24, "ignore_eos": True, "stream": True}
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            time.sleep(0.05)

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(6)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join()


def test_every_panel_shows_something(prometheus: Prometheus, load: None) -> None:
    empty = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    deadline = time.monotonic() + 90
    while empty and time.monotonic() < deadline:
        time.sleep(2)
        try:
            empty = [(title, expression) for title, expression in empty if not prometheus.values(filled_in(expression))]
        except OSError:  # it is starting
            continue
    assert empty == []


def test_variables_list_what_there_is(prometheus: Prometheus, load: None, server: Served) -> None:
    found = {}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            inner = variable["definition"].removeprefix("label_values(").removesuffix(")")
            metric, label = inner.rsplit(", ", 1)
            found[name] = {one[label] for one in prometheus.get("series", **{"match[]": filled_in(metric)})}
    address = server.url.removeprefix("http://")
    assert found == {"job": {"pagewise"}, "instance": {address}, "model": {"pagewise-demo"}}


def test_panels_are_bounded_where_they_say_so(prometheus: Prometheus, load: None) -> None:
    for panel in PANELS:
        most = panel["fieldConfig"]["defaults"].get("max")
        if most is not None:
            for target in panel["targets"]:
                assert all(0 <= value <= most * 1.05 for value in prometheus.values(filled_in(target["expr"])))


def test_prometheus_evaluates_every_rule(prometheus: Prometheus, load: None) -> None:
    deadline = time.monotonic() + 20
    while True:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if rules and all(rule["health"] == "ok" for rule in rules):
            break
        assert time.monotonic() < deadline, rules
        time.sleep(0.5)
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in RULES}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert not firing & {"PagewiseDown", "PagewiseNoExecutor", "PagewiseRequestsFail", "PagewiseStepErrors"}
