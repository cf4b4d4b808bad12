"""What a gateway tells Prometheus.

Role: the definitions, and what of the gateway's records each of them is. It changes nothing. Labels hold no more than
models, routes, statuses and codes: never what a client made up. What is bound to happen is there at 0 before it does,
since a rate misses the event with which a series begins.
"""

import asyncio
from collections import Counter as Count
from collections.abc import Iterator

import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from common.metrics import PICTURE_S, Family, OnScrape, Reading
from services.gateway.errors import HTTP_ERRORS
from services.gateway.links import ControlLink, DataLink
from services.gateway.models import ModelTable
from services.gateway.pending import PendingCall, PendingCalls, PendingRequest

FAMILIES = (
    Family("gauge", "stepweave_gateway_pending_requests", "Requests that clients wait for.", ("model",)),
    Family("gauge", "stepweave_gateway_scheduler_heard", "1 if the scheduler was heard lately, else 0."),
    Family("counter", "stepweave_gateway_late_outcomes_total", "Outcomes that came after a request's first; dropped."),
    Family("counter", "stepweave_gateway_stray_messages_total", "Messages about requests that are not known here."),
    Family("counter", "stepweave_gateway_malformed_frames_total", "Frames dropped: no message.", ("link",)),
    Family("counter", "stepweave_gateway_truncated_images_total", "Pictures dropped: not of the length they say."),
    Family("counter", "stepweave_gateway_unsent_messages_total", "Messages that ZeroMQ did not take.", ("link",)),
)

OUTCOMES = ("completed", "error", "aborted")
# Status and code of the replies to a call for pictures; the few others are counted from their first on.
REPLIES = (
    (200, ""),
    (499, ""),
    (400, "invalid_request_error"),
    (400, "unknown_parameter"),
    (413, "body_too_large"),
    (503, "scheduler_unavailable"),
    *((http.status, code) for code, http in HTTP_ERRORS.items()),
)


class GatewayMetrics:
    """Counts what happens; `watch` adds what merely is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._replies = Counter(
            "stepweave_gateway_replies_total",
            "HTTP replies; code is that of the error, if there is one. Status 499: the client went away.",
            ("route", "status", "code"),
            registry=registry,
        )
        self._requests = Counter(
            "stepweave_gateway_requests_total",
            "Requests (pictures asked for) that have ended: completed, error or aborted.",
            ("model", "outcome"),
            registry=registry,
        )
        self._request_seconds = Histogram(
            "stepweave_gateway_request_seconds",
            "From the call to the picture's arrival at the gateway.",
            ("model",),
            buckets=PICTURE_S,
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "stepweave_gateway_queue_seconds",
            "What of that was waiting: for a worker, for a place in the batch, on the way.",
            ("model",),
            buckets=PICTURE_S,
            registry=registry,
        )

    def expect_route(self, route: str, draws: bool) -> None:
        """There is such a route, which draws pictures or only tells something."""
        for status, code in REPLIES if draws else [(200, "")]:
            self._replies.labels(route, str(status), code)

    def expect_model(self, model: str) -> None:
        """There is such a model."""
        for outcome in OUTCOMES:
            self._requests.labels(model, outcome)
        self._request_seconds.labels(model)
        self._queue_seconds.labels(model)

    def replied(self, route: str, status: int, code: str) -> None:
        """An HTTP call was answered. `route` is the pattern, not the path that a client wrote."""
        self._replies.labels(route, str(status), code).inc()

    def request_ended(self, call: PendingCall, request: PendingRequest) -> None:
        """A request has its one outcome."""
        self._requests.labels(call.model, request.ended).inc()
        if request.picture is not None:
            total_s = request.picture.arrived_at - call.opened_at
            stages_s = sum(msgspec.structs.astuple(request.picture.message.timings))
            self._request_seconds.labels(call.model).observe(total_s)
            self._queue_seconds.labels(call.model).observe(max(0.0, total_s - stages_s))

    def watch(
        self,
        calls: PendingCalls,
        models: ModelTable,
        control: ControlLink,
        data: DataLink,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """From now on these are read at each scrape."""

        def read() -> Iterator[Reading]:
            pending: Count[str] = Count(dict.fromkeys(models.ready(), 0))  # a curve comes down to 0, and does not end
            for call in calls.open_calls():
                pending[call.model] += len(call.unfinished)
            for model, count in pending.items():
                yield Reading("stepweave_gateway_pending_requests", count, (model,))
            yield Reading("stepweave_gateway_scheduler_heard", control.alive)
            yield Reading("stepweave_gateway_late_outcomes_total", calls.late_terminals)
            yield Reading("stepweave_gateway_stray_messages_total", calls.strays)
            yield Reading("stepweave_gateway_truncated_images_total", data.truncated)
            yield Reading("stepweave_gateway_malformed_frames_total", control.malformed, ("control",))
            yield Reading("stepweave_gateway_malformed_frames_total", data.malformed, ("data",))
            yield Reading("stepweave_gateway_unsent_messages_total", control.unsent, ("control",))
            yield Reading("stepweave_gateway_unsent_messages_total", data.unsent, ("data",))

        self._registry.register(OnScrape(FAMILIES, read, loop))
