"""The compose file's structure: what docker would be told, without docker."""

import re
from urllib.parse import urlsplit

import pytest

from common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from services.settings import COMMANDS, NO_FILE, PREFIX, resolve
from tests.deploy import files

ZEROMQ_PORTS = {"5570", "5571"}
OURS = files.our_services()
WORKERS = {name: service for name, service in OURS.items() if name.startswith("worker")}


def config(name: str) -> GatewayConfig | SchedulerConfig | WorkerConfig:
    return files.config(OURS[name])


def profiles(name: str) -> set[str]:
    return set(files.services()[name].get("profiles", []))


def test_there_are_a_gateway_a_scheduler_and_a_worker() -> None:
    assert set(OURS) - set(WORKERS) == {"gateway", "scheduler"}
    assert isinstance(config("gateway"), GatewayConfig)
    assert isinstance(config("scheduler"), SchedulerConfig)
    for name in WORKERS:
        assert isinstance(config(name), WorkerConfig)


def test_they_find_each_other_by_the_names_and_ports_of_the_network() -> None:
    gateway, scheduler, worker = config("gateway"), config("scheduler"), config("worker")
    assert isinstance(gateway, GatewayConfig)
    assert isinstance(scheduler, SchedulerConfig)
    for peer in (gateway, worker):
        address = urlsplit(peer.scheduler)
        assert (address.hostname, address.port) == ("scheduler", urlsplit(scheduler.bind).port)
    advertised = urlsplit(gateway.advertise)
    assert (advertised.hostname, advertised.port) == ("gateway", urlsplit(gateway.data_bind).port)
    for bound in (gateway.data_bind, scheduler.bind):
        assert urlsplit(bound).hostname == "0.0.0.0"
    assert gateway.host == "0.0.0.0"
    for name in OURS:
        assert config(name).metrics_host == "0.0.0.0", "Prometheus is another container"
        assert config(name).log_format == "json"


@pytest.mark.parametrize("name", OURS)
def test_each_is_built_from_a_stage_that_there_is(name: str) -> None:
    build = OURS[name]["build"]
    assert (build["context"], build["dockerfile"]) == (".", "deploy/Dockerfile")
    assert build["target"] == ("worker" if name in WORKERS else "control")
    arguments = {each.arguments.partition("=")[0] for each in files.stages()[build["target"]] if each.name == "ARG"}
    assert set(build.get("args", {})) <= arguments


def test_no_two_builds_make_an_image_of_one_name() -> None:
    """Compose makes all of them at once, so the second would find the name taken. Layers are shared without a name."""
    names = [service["image"] for service in OURS.values() if "image" in service]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", OURS)
def test_each_has_a_health_check_on_a_port_that_it_listens_on(name: str) -> None:
    url = urlsplit(files.healthcheck_url(OURS[name]))
    own = config(name)
    if url.path == "/metrics":
        assert url.port == own.metrics_port != 0
    else:
        assert isinstance(own, GatewayConfig)
        assert (url.path, url.port) == ("/health/ready", own.port)
    assert {"interval", "timeout", "retries", "start_period"} <= set(OURS[name]["healthcheck"])


@pytest.mark.parametrize("name", OURS)
def test_each_ends_in_order_and_comes_back(name: str) -> None:
    service = OURS[name]
    assert (service["init"], service["restart"]) == (True, "unless-stopped")
    assert int(service["stop_grace_period"].removesuffix("s")) > 5
    assert "depends_on" not in service, "services start in any order"


def test_only_the_gateway_publishes_a_port_and_that_is_the_apis() -> None:
    assert [name for name, service in OURS.items() if "ports" in service] == ["gateway"]
    (published,) = OURS["gateway"]["ports"]
    assert published == "${PUBLISH:-127.0.0.1:8000}:8000"
    assert config("gateway").port == 8000  # type: ignore[union-attr]


def test_no_zeromq_and_no_metrics_port_is_published_by_anybody() -> None:
    private = ZEROMQ_PORTS | {str(config(name).metrics_port) for name in OURS}
    for name, service in files.services().items():
        for published in service.get("ports", []):
            assert published.rpartition(":")[2] not in private, name
            if name != "gateway":
                assert published.startswith("127.0.0.1:"), name
        assert service.get("network_mode") is None
        assert "expose" not in service


def test_the_services_meet_in_a_network_that_has_no_way_out() -> None:
    networks = files.compose()["networks"]
    assert networks["ring"]["internal"] is True
    for name, service in OURS.items():
        assert "ring" in service["networks"], name
    # What must publish a port or fetch models has a way out, and so can be reached by it too.
    assert {name for name, service in OURS.items() if "outside" in service["networks"]} == {"gateway", *WORKERS}
    for service in files.services().values():
        assert set(service["networks"]) <= set(networks)


@pytest.mark.parametrize("name", WORKERS)
def test_there_may_be_any_number_of_a_worker(name: str) -> None:
    service = WORKERS[name]
    assert not {"container_name", "hostname", "ports"} & set(service)
    assert "name" not in files.flags(service)[1], "each draws an id of its own"
    assert service["networks"]["ring"]["aliases"] == ["workers"]


def test_cpu_workers_are_the_default() -> None:
    lines = (files.ROOT / ".env").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["COMPOSE_PROFILES=cpu"]
    assert [name for name in WORKERS if "cpu" in profiles(name)] == ["worker"]
    assert profiles("gateway") == profiles("scheduler") == set()
    assert "TORCH_INDEX" not in OURS["worker"]["build"].get("args", {})


@pytest.mark.parametrize(("profile", "count"), [("gpu", 1), ("gpu-2", 2), ("gpu-4", 4)])
def test_a_gpu_profile_has_one_worker_a_gpu_and_none_on_cpus(profile: str, count: int) -> None:
    members = [service for name, service in WORKERS.items() if profile in profiles(name)]
    devices = [service["deploy"]["resources"]["reservations"]["devices"] for service in members]
    assert [device["device_ids"] for (device,) in devices] == [[str(index)] for index in range(count)]
    assert all(device["capabilities"] == ["gpu"] and device["driver"] == "nvidia" for (device,) in devices)
    assert not any("cpu" in service["profiles"] for service in members)


def test_models_and_measurements_are_in_volumes() -> None:
    declared = set(files.compose()["volumes"])
    for name, service in files.services().items():
        for volume in service.get("volumes", []):
            source = volume.partition(":/")[0]
            if source.startswith("./"):
                assert (files.ROOT / source).is_file(), source
                assert volume.endswith(":ro")
            else:
                assert source.removeprefix("${MODELS:-").removesuffix("}") in declared
        if name in WORKERS:
            assert "${MODELS:-models}:/models" in service["volumes"]
    environment = [each for each in files.stages()["worker"] if each.name == "ENV"]
    assert any("HF_HOME=/models/" in each.arguments for each in environment), "what is fetched from the hub is kept"


@pytest.mark.parametrize("name", OURS)
def test_settings_come_from_one_file_that_nothing_overrides(name: str) -> None:
    assert OURS[name]["env_file"] == [{"path": "stepweave.env", "required": False}]
    # A name without a value would take it out of what the file says, wherever the shell has none.
    assert not [variable for variable in OURS[name].get("environment", []) if variable.startswith(PREFIX)]


def test_the_examples_of_settings_are_settings() -> None:
    for text in ((files.ROOT / "README.md").read_text(), (files.ROOT / "docker-compose.yml").read_text()):
        examples = re.findall(r"^(?:#   )?(STEPWEAVE_\w+)=(\S+)", text, flags=re.MULTILINE)
        assert examples
        for command in COMMANDS:
            resolve(command, {}, dict(examples), NO_FILE)
