"""A process's metrics, as Prometheus reads them."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.stack import BenchError


async def read_page(session: aiohttp.ClientSession, url: str) -> str:
    """The text of the page. Raises `BenchError` if it can't be read."""
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"the metrics at {url} can't be read: {error or type(error).__name__}") from error


def samples(page: str) -> list[Sample]:
    """Every value on a page."""
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]
