"""The records of settings, and what their fields must be together."""

from itertools import combinations
from typing import Annotated, Literal, get_args, get_origin

import msgspec
import pytest
from msgspec import Meta, Struct
from msgspec.structs import fields

from common.config import (
    RULES,
    GatewayConfig,
    PolicyName,
    SchedulerConfig,
    ServeConfig,
    WorkerConfig,
    broken_rule,
)
from services.scheduler.policy import POLICIES

RECORDS = [ServeConfig, GatewayConfig, SchedulerConfig, WorkerConfig]


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_says_what_it_means_and_what_it_may_be(record: type[Struct]) -> None:
    for field in fields(record):
        assert get_origin(field.type) is Annotated, field.name
        kind, meta = get_args(field.type)
        assert isinstance(meta, Meta)
        assert meta.description, field.name
        assert kind in (int, float, str, bool) or get_origin(kind) is Literal, field.name
        if kind in (int, float):
            assert meta.ge is not None or meta.gt is not None, field.name
            assert meta.le is not None, field.name  # which also keeps infinity out


@pytest.mark.parametrize("record", RECORDS)
def test_every_default_is_allowed(record: type[Struct]) -> None:
    given = {"model": "folder"} if record in (ServeConfig, WorkerConfig) else {}
    config = record(**given)
    assert msgspec.convert(msgspec.to_builtins(config), record) == config
    assert broken_rule(config) is None


@pytest.mark.parametrize("service", [GatewayConfig, SchedulerConfig, WorkerConfig])
def test_what_serve_passes_on_has_the_services_own_type_and_default(service: type[Struct]) -> None:
    of_serve = {field.name: field for field in fields(ServeConfig)}
    shared = [field for field in fields(service) if field.name in of_serve]
    assert len(shared) > 5
    for field in shared:
        assert of_serve[field.name].default == field.default, field.name
        # The first of several ports there, and other workers to share the cores with; their descriptions say so.
        if field.name not in ("metrics_port", "threads"):
            assert of_serve[field.name].type == field.type, field.name


def test_what_two_commands_share_is_one_setting() -> None:
    for one, other in combinations([GatewayConfig, SchedulerConfig, WorkerConfig], 2):
        types = {field.name: field.type for field in fields(one)}
        for field in fields(other):
            assert types.get(field.name, field.type) == field.type, field.name


def test_every_policy_can_be_chosen() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)


BROKEN = [
    (SchedulerConfig(suspect_after_s=0.5), {"suspect_after_s", "lost_after_s"}),
    (SchedulerConfig(suspect_after_s=5.5), {"suspect_after_s", "lost_after_s"}),
    (WorkerConfig(model="x", max_residents=7), {"max_residents", "max_num_seqs"}),
    (WorkerConfig(model="x", compile=True, offload="group"), {"compile", "offload"}),
    (GatewayConfig(metrics_port=8000), {"port", "metrics_port"}),
    (ServeConfig(model="x", suspect_after_s=6), {"suspect_after_s", "lost_after_s"}),
    (ServeConfig(model="x", max_num_seqs=2, max_residents=1), {"max_residents", "max_num_seqs"}),
    (ServeConfig(model="x", compile=True, offload="group"), {"compile", "offload"}),
    (ServeConfig(model="x", metrics_port=8000), {"port", "metrics_port", "workers"}),
    (ServeConfig(model="x", metrics_port=7996, workers=3), {"port", "metrics_port", "workers"}),
    (ServeConfig(model="x", metrics_port=65_534), {"metrics_port", "workers"}),
]
KEPT = [
    SchedulerConfig(suspect_after_s=5.0),
    WorkerConfig(model="x", max_residents=8),
    WorkerConfig(model="x", compile=True, offload="model"),
    GatewayConfig(metrics_port=8001),
    ServeConfig(model="x", metrics_port=7995, workers=3),
    ServeConfig(model="x", metrics_port=65_533),
]


@pytest.mark.parametrize(("config", "names"), BROKEN)
def test_fields_that_contradict_each_other_are_found(config: Struct, names: set[str]) -> None:
    rule = broken_rule(config)
    assert rule is not None
    assert set(rule.fields) == names


@pytest.mark.parametrize("config", KEPT)
def test_fields_at_the_edge_of_their_rules_are_not(config: Struct) -> None:
    assert broken_rule(config) is None


def test_every_rule_is_seen_broken() -> None:
    seen = {(type(config), rule) for config, _ in BROKEN if (rule := broken_rule(config))}
    assert seen == {(record, rule) for record, rules in RULES.items() for rule in rules}


def test_metrics_ports_are_the_gateways_the_schedulers_and_the_workers() -> None:
    assert list(ServeConfig(model="x", metrics_port=9100, workers=3).metrics_ports()) == [9100, 9101, 9102, 9103, 9104]
    assert not ServeConfig(model="x").metrics_ports()
