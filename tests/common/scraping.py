"""Reads metrics as Prometheus does."""

import urllib.request
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

DEADLINE_S = 10.0


class Scraped:
    """The samples of one scrape."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name and those labels; fails if there are none."""
        found = [each.value for each in self._samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(each.labels) for each in self._samples if each.name == name]

    def counted(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Name and labels of each counter's and histogram's series."""
        counts = [each for each in self._samples if each.name.endswith(("_total", "_count"))]
        return {(each.name, tuple(sorted(each.labels.items()))) for each in counts}

    def names(self) -> set[str]:
        return {each.name for each in self._samples}


def of(registry: Any) -> Scraped:
    """What a registry holds, read here and now."""
    return Scraped(sample for metric in registry.collect() for sample in metric.samples)


def scrape(port: int) -> Scraped:
    """What a process answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as response:
        text = response.read().decode()
    return Scraped(sample for metric in text_string_to_metric_families(text) for sample in metric.samples)
