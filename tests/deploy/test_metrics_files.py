"""The Prometheus configuration, the dashboard and the README name what there is."""

import json
import re
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from common.metrics import OnScrape, new_registry
from services.gateway import metrics as gateway_metrics
from services.scheduler import metrics as scheduler_metrics
from services.worker import metrics as worker_metrics
from tests.deploy import files

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
DASHBOARD = json.loads((files.DEPLOY / "grafana" / "stepweave.json").read_text())
PROMETHEUS = yaml.safe_load((files.DEPLOY / "prometheus.yml").read_text())


def registries() -> list[CollectorRegistry]:
    """Of the three services, each with all that it defines."""
    gateway, scheduler, worker = new_registry(), new_registry(), new_registry()
    gateway_metrics.GatewayMetrics(gateway)
    scheduler_metrics.SchedulerMetrics(scheduler)
    worker_metrics.WorkerMetrics(worker, "demo")
    modules = (gateway_metrics, scheduler_metrics, worker_metrics)
    for registry, module in zip((gateway, scheduler, worker), modules, strict=True):
        registry.register(OnScrape(module.FAMILIES, list))
    return [gateway, scheduler, worker]


def families() -> dict[str, str]:
    """Name, as a counter is read, and type of all metrics of all services."""
    found = {}
    for registry in registries():
        for metric in registry.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            assert metric.name.startswith("process_") or name not in found, "two services use one name"
            found[name] = metric.type
    return found


def series() -> set[str]:
    """All names that a query may use."""
    return {
        name.removesuffix("_total") + suffix if kind == "counter" else name + suffix
        for name, kind in families().items()
        for suffix in SUFFIXES[kind]
    }


def queries() -> list[str]:
    found: list[str] = []

    def collect(node: Any) -> None:
        match node:
            case dict():
                found.extend(
                    value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str)
                )
                for value in node.values():
                    collect(value)
            case list():
                for value in node:
                    collect(value)

    collect(DASHBOARD)
    return found


def named(texts: list[str]) -> set[str]:
    return {name for text in texts for name in re.findall(r"\b(?:stepweave|process)_\w+", text)}


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("stepweave_")}


def test_names_follow_the_rules_of_prometheus() -> None:
    for name, kind in families().items():
        assert re.fullmatch(r"(stepweave_(gateway|scheduler|worker)|process)_[a-z_]+", name), name
        assert (kind == "counter") == name.endswith("_total"), name
        if kind == "histogram" and name != "stepweave_worker_step_rows":
            assert name.endswith("_seconds"), name


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    asked = named(queries())
    assert len(asked) > 20
    assert asked <= series(), asked - series()


def test_the_dashboard_shows_all_that_the_services_tell() -> None:
    asked = named(queries())
    unseen = [
        name
        for name, kind in families().items()
        if name.startswith("stepweave_")
        and not any(name.removesuffix("_total") + suffix in asked for suffix in SUFFIXES[kind])
    ]
    assert not unseen


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["targets"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval"} == variables
    for expression in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression


def unit(expression: str) -> str:
    """Of what a query gives, as Grafana calls it; "ops" for any rate of events."""
    name = named([expression]).pop()
    of_metric = "s" if "_seconds" in name else "bytes" if name.endswith("_bytes") else "short"
    if "rate(" not in expression or "histogram_quantile(" in expression or " / " in expression:
        return of_metric
    return {"s": "percentunit", "short": "ops"}[of_metric]


@pytest.mark.parametrize(
    "panel", [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_what_a_panel_shows_has_its_unit(panel: dict[str, Any]) -> None:
    shown = {"reqps": "ops"}.get(panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"]["unit"])
    assert {unit(target["expr"]) for target in panel["targets"]} == {shown}


def test_labels_in_the_dashboard_are_labels_of_its_metrics() -> None:
    labels = {
        "le",
        "job",
        "instance",
        "model",
        "outcome",
        "code",
        "status",
        "state",
        "phase",
        "link",
        "reason",
        "route",
    }
    for expression in queries():
        grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
        matched = set(re.findall(r"[{,](\w+)[!=]", expression))
        assert grouped | matched <= labels, expression


def test_the_readme_lists_all_metrics_and_no_others() -> None:
    readme = (files.ROOT / "README.md").read_text()
    assert own(named([readme])) == own(set(families()))


def test_prometheus_asks_the_services_of_the_compose_file_on_their_ports() -> None:
    """By their names there, and workers, however many, by the name that they all have in the network."""
    services = files.our_services()
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    assert set(jobs) == {"gateway", "scheduler", "worker"}
    for name in ("gateway", "scheduler"):
        (static,) = jobs[name]["static_configs"]
        assert static["targets"] == [f"{name}:{files.config(services[name]).metrics_port}"]
    (discovered,) = jobs["worker"]["dns_sd_configs"]
    assert discovered["type"] == "A"
    for name, service in services.items():
        if name.startswith("worker"):
            assert service["networks"]["ring"]["aliases"] == discovered["names"]
            assert files.config(service).metrics_port == discovered["port"]
    assert "ring" in files.services()["prometheus"]["networks"]


def test_grafana_is_told_where_prometheus_and_the_dashboard_are() -> None:
    folder = files.DEPLOY / "grafana"
    (source,) = yaml.safe_load((folder / "datasources.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards.yml").read_text())["providers"]
    mounted = [volume.split(":") for volume in files.services()["grafana"]["volumes"]]
    assert ["./deploy/grafana/stepweave.json", f"{provider['options']['path']}/stepweave.json", "ro"] in mounted
    assert set(files.services()["prometheus"]["networks"]) & set(files.services()["grafana"]["networks"])
