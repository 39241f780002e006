"""Alert rules, dashboard and scrape settings name what processes export, and every metric is documented."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from scripts.reference.metrics_page import EXPORTED, documented
from tests.support.promql import PromqlError, PromqlExpression, PromqlSelector, read_promql
from tracelake.cli.main import app
from tracelake.dev.app import TARGETS_FILE
from tracelake.dispatcher.invoker_client import InvokeOutcome
from tracelake.domain.chain_status import ChainCondition
from tracelake.domain.pressure import Tier

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
TARGET = {"job", "instance", "part"}
"""Labels that the scrape settings give to every sample."""
PROMETHEUS = {"up": set[str]()}
SAMPLES = {name: set(labels) for each in documented() for name, labels in each.samples.items()} | PROMETHEUS
DURATION = re.compile(r"\d+[smhd]")
ONE_PER_FOLLOWER = {"tracelake_rpc_endpoint_ok"}
FIXED_VALUES = {
    "condition": {each.value for each in ChainCondition},
    "part": {*EXPORTED},
    "tier": {each.value for each in Tier},
}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def panels(of: dict[str, Any] = DASHBOARD) -> Iterator[dict[str, Any]]:
    for panel in of.get("panels", []):
        if panel["type"] != "row":
            yield panel
        yield from panels(panel)


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert inner, variable["query"]
            yield f"variable {variable['name']}", f"group by ({inner[2]}) ({inner[1]})"


def problems(expression: PromqlExpression) -> list[str]:
    """What in an expression no process exports."""
    found = []
    for each in expression.selectors:
        if each.metric not in SAMPLES:
            found.append(f"no process exports {each.metric}")
            continue
        found += [
            f"{each.metric} has no label {label}" for label in each.labels - SAMPLES[each.metric] - TARGET
        ]
        found += [text for matcher in each.matchers for text in _values(each, *matcher)]
        counts = each.metric.endswith(("_total", "_bucket", "_sum", "_count"))
        if counts and not each.has_range:
            found.append(f"{each.metric} only grows: it needs a rate")
    for labels, metrics in expression.grouped:
        known = set.intersection(*(SAMPLES.get(metric, set()) | TARGET for metric in metrics))
        found += [f"{', '.join(metrics)} have no label {label}" for label in labels if label not in known]
    return found


def _values(selector: PromqlSelector, label: str, operator: str, value: str) -> list[str]:
    if label not in FIXED_VALUES or "$" in value:
        return []
    values = value.split("|") if "~" in operator else [value]
    return [f"{label} is never {each}" for each in values if each not in FIXED_VALUES[label]]


@pytest.mark.parametrize(("where", "text"), [*expressions()], ids=lambda value: str(value)[:60])
def test_an_expression_names_what_is_exported(where: str, text: str) -> None:
    assert problems(read_promql(text)) == [], where


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tracelake_no_such_metric > 0", "no process exports"),
        ('tracelake_workers{runtim="x"} > 0', "has no label runtim"),
        ("sum by (dag) (tracelake_workers)", "have no label dag"),
        ("tracelake_retries_total > 3", "needs a rate"),
        ("rate(tracelake_retries[5m])", "no process exports tracelake_retries"),
        ('tracelake_chain_condition{condition="sleeping"} == 1', "never sleeping"),
        ("tracelake_workers > 0 unless on (dag) tracelake_chain_reorgs", "have no label dag"),
    ],
)
def test_what_is_not_exported_is_found(text: str, problem: str) -> None:
    assert any(problem in each for each in problems(read_promql(text)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "up ==",
        "rat(up[5m])",
        "sum(up",
        "up{a}",
        'up{a=="b"}',
        "up[5]",
        "up 3",
        "sum by (a b) (up)",
        "up{}}",
    ],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(PromqlError):
        read_promql(text)


def test_every_alert_says_what_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    root = get_command(app)
    commands = set(getattr(root, "commands", {}))
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert rule["alert"].startswith("Tracelake")
        assert DURATION.fullmatch(rule.get("for", "1m")), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "action"}
        kept = set().union(*(SAMPLES[each.metric] for each in read_promql(rule["expr"]).selectors)) | TARGET
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, rule["alert"]
            assert set(re.findall(r"tracelake ([a-z-]+)", text)) <= commands, rule["alert"]


def test_a_chain_stands_still_by_the_number_of_its_head_while_that_is_known() -> None:
    [rule] = [each for each in alerts() if each["alert"] == "TracelakeChainStandsStill"]
    named = {each.metric: each.has_range for each in read_promql(rule["expr"]).selectors}
    assert "tracelake_chain_head_age_seconds" not in named, "a block's own time says nothing of now"
    assert named["tracelake_chain_head_block"], "its changes"
    assert not named["tracelake_chain_known_age_seconds"]


def test_a_hold_of_bulk_work_alone_is_no_alert() -> None:
    matchers = [
        each.matchers
        for rule in alerts()
        for each in read_promql(rule["expr"]).selectors
        if each.metric == "tracelake_jobs_held"
    ]
    assert matchers
    assert all(("tier", "=", "normal") in each for each in matchers)


def test_functions_that_wait_are_an_alert_only_where_none_is_invoked() -> None:
    [rule] = [each for each in alerts() if each["alert"] == "TracelakeInvocationsWait"]
    waits, _, invoked = rule["expr"].partition(" unless ")
    assert [each.metric for each in read_promql(waits).selectors] == ["tracelake_invocations_waiting"]
    [total] = read_promql(invoked).selectors
    assert (total.metric, total.has_range) == ("tracelake_invocations_total", True)
    assert total.matchers == (("outcome", "=", InvokeOutcome.ACCEPTED.value),), "refusals are no progress"


def test_an_alert_about_what_must_be_there_also_fires_without_a_sample() -> None:
    """A process that is gone exports nothing, and a comparison with nothing is no alert."""
    expected = {
        each.metric
        for rule in alerts()
        if re.search(r"== 0$|time\(\) -", rule["expr"])
        for each in read_promql(rule["expr"]).selectors
    }
    asked = {metric for rule in alerts() for metric in re.findall(r"absent\((\w+)", rule["expr"])}
    assert expected - ONE_PER_FOLLOWER <= asked
    assert "tracelake_scheduler_acting" in asked


def test_the_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) >= 15
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        for target in panel["targets"]:
            named = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert named <= variables, panel["title"]
    places = [tuple(panel["gridPos"].values()) for panel in panels()]
    assert len(places) == len(set(places))


def test_prometheus_keeps_the_label_job_and_finds_the_file_that_a_stack_writes() -> None:
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    [scrape] = settings["scrape_configs"]
    assert scrape["honor_labels"] is True
    assert scrape["job_name"] == "tracelake"
    [files] = scrape["file_sd_configs"]
    assert files["files"] == [f"HOME/{TARGETS_FILE}"]
    assert all((MONITORING / name).exists() for name in settings["rule_files"])


def test_every_metric_says_what_it_is() -> None:
    for each in documented():
        assert len(each.text.split()) >= 1, each.name
        assert each.text.endswith("."), each.name
        assert not set(each.labels) & {"task_id", "instance", "part"} or each.name == "tracelake_process_info"


def test_every_module_that_makes_metrics_is_listed() -> None:
    """By the sources of the functions that make them."""
    makers = set()
    for path in (ROOT / "src" / "tracelake").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "prometheus_client" in source else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client"):
                names = {alias.name for alias in node.names}
                if names & {"Counter", "Gauge", "Histogram", "Summary", "Info", "Collector"}:
                    makers.add(path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", "."))
    page = (ROOT / "scripts" / "reference" / "metrics_page.py").read_text(encoding="utf-8")
    listed = {
        node.module for node in ast.walk(ast.parse(page)) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert makers <= listed, f"add them to EXPORTED in scripts/reference/metrics_page.py: {makers - listed}"
