"""What the HTTP handlers share, as one record in the application.

Role: the typed keys to it. No behaviour.
"""

import dataclasses
from typing import Any

from aiohttp import web

from common.params import DataHome
from services.gateway.links import ControlLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import ModelTable
from services.gateway.pending import PendingCalls


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayState:
    """Made once, when the gateway starts."""

    home: DataHome  # of the requests taken here
    calls: PendingCalls
    models: ModelTable
    control: ControlLink
    request_timeout_s: float
    metrics: GatewayMetrics


STATE = web.AppKey("state", GatewayState)
# The id of this HTTP call, its x-request-id.
CALL_ID = web.RequestKey("call_id", str)
# What a handler adds to its call's log line.
LOG_FIELDS: web.RequestKey[dict[str, Any]] = web.RequestKey("log_fields", dict)
