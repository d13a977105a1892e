"""A real Prometheus scrapes a real server: the series that board and rules name exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.serving import Client, Server, ServerError, free_port

FOLDER = Path(__file__).parents[2] / "docs" / "operations"
ALERT_CASES = Path(__file__).parents[1] / "data" / "alert_cases.yml"

SECONDS = 60.0
"""Prometheus has so long for its first samples."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool, Debian's package prometheus",
)
pytestmark = [needs_prometheus, pytest.mark.xdist_group("bundled server")]


@pytest.fixture(scope="module")
def prometheus(
    bundled_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A Prometheus with the configuration of the docs scrapes a server that has been used."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [bundled_server.url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yml", folder)

    chain = make_chain(seed=3, facts=128, hops=40)
    body = {"model": "default", "prompt": chain.prompt, "max_tokens": chain.max_tokens}
    bundled_server.post("/v1/completions", body).raise_for_status()

    port = free_port()
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        client = Client(f"http://127.0.0.1:{port}")
        wait_for_samples(client)
        yield client
    finally:
        process.terminate()
        process.wait(30)


def wait_for_samples(client: Client) -> None:
    """Wait for two scrapes, which a rate takes."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if query(client, "count_over_time(sglang_cache_rank_up[1m]) > 1"):
                return
        except (ServerError, ValueError):  # while it starts, it answers with words
            pass
        assert time.monotonic() < deadline, "no samples arrived"
        time.sleep(0.2)


def query(client: Client, expression: str) -> list[Any]:
    """The series that an expression gives at this moment."""
    response = client.get(f"/api/v1/query?query={quote(expression, safe='')}")
    answer = response.json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


def board_expressions() -> list[str]:
    """The expressions of the board, its variables filled in as Grafana does."""
    board = json.loads((FOLDER / "grafana.json").read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]
    return [
        expression.replace("$instance", ".*").replace("$__rate_interval", "1m")
        for expression in expressions
    ]


def rule_expressions() -> list[str]:
    """The expressions of the rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def series_named(expressions: list[str]) -> set[str]:
    """Patterns of the names of all series in some expressions; both give SGLang's in two ways."""
    found = {
        name for text in expressions for name in re.findall(r"\bsglang(?:_|\[:_\])[a-z0-9_]+", text)
    }
    assert len(found) > 5
    return found


@pytest.mark.parametrize("expressions", [board_expressions, rule_expressions])
def test_every_series_exists(prometheus: Client, expressions: Any) -> None:
    names = set(prometheus.read("/api/v1/label/__name__/values")["data"])
    missing = {
        wanted
        for wanted in series_named(expressions())
        if not any(re.fullmatch(wanted, name) for name in names)
    }
    assert missing == set()


def test_every_panel_shows_something(prometheus: Client) -> None:
    assert [text for text in board_expressions() if not query(prometheus, text)] == []


def test_the_rules_are_loaded_and_silent(prometheus: Client) -> None:
    (group,) = prometheus.read("/api/v1/rules")["data"]["groups"]
    assert len(group["rules"]) == len(rule_expressions())
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_alarms_ring_when_they_should() -> None:
    for command in (
        ["promtool", "check", "rules", str(FOLDER / "alerts.yml")],
        ["promtool", "check", "config", str(FOLDER / "prometheus.yml")],
        ["promtool", "test", "rules", str(ALERT_CASES)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_names_every_alarm() -> None:
    page = (FOLDER.parent / "guide.md").read_text()
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for group in groups for rule in group["rules"]]
    assert [name for name in names if f"`{name}`" not in page] == []
