"""What a worker tells Prometheus.

Role: the definitions, and what of a worker's messages and records each of them is. All of it happens on the event
loop: the step thread pays nothing. Each outcome is there at 0 before it happens, since a rate misses the event with
which a series begins.
"""

import asyncio
from collections import Counter as Count
from collections.abc import Iterator
from typing import Protocol, get_args

from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from common.errors import ErrorCode
from common.messages import RequestDone, ResidentPhase, StepResult
from common.metrics import GAP_S, PICTURE_S, ROWS, STAGE_S, STEP_S, Family, OnScrape, Reading
from services.worker.delivery import Delivery
from services.worker.residents import Residents
from services.worker.session import Introduction, Session

FAMILIES = (
    Family("gauge", "stepweave_worker_info", "1; who this worker is.", ("worker_id", "model", "device")),
    Family("gauge", "stepweave_worker_residents", "Requests held, by phase.", ("phase",)),
    Family(
        "gauge", "stepweave_worker_credit_stalled", "1 if finished pictures wait for a gateway to take them, else 0."
    ),
    Family("counter", "stepweave_worker_images_acknowledged_total", "Pictures that a gateway has taken."),
    Family("counter", "stepweave_worker_images_sent_again_total", "Sends of a picture after its first."),
    Family("counter", "stepweave_worker_prompts_encoded_total", "Texts given to the text encoders."),
    Family("counter", "stepweave_worker_prompts_reused_total", "Texts whose embedding was there already."),
    Family("counter", "stepweave_worker_malformed_frames_total", "Frames dropped: no message.", ("link",)),
)


class PromptCounts(Protocol):
    """Of `Preparation`, which this must not import: it would bring torch along."""

    encoded: int
    reused: int


class WorkerMetrics:
    """Counts what happens; `watch` adds what merely is."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model",), buckets=buckets, registry=registry).labels(model)

        self._step_seconds = histogram("stepweave_worker_step_seconds", "One denoise step of one group.", STEP_S)
        self._step_rows = histogram("stepweave_worker_step_rows", "Rows in it; guidance makes two of a request.", ROWS)
        self._idle_seconds = histogram(
            "stepweave_worker_idle_seconds",
            "From a step's end to the next one's start, also where there was nothing to do.",
            GAP_S,
        )
        self._stages = {
            "encode_s": histogram("stepweave_worker_encode_seconds", "Preparing a request.", STAGE_S),
            "denoise_s": histogram(
                "stepweave_worker_denoise_seconds", "First step's start to last one's end.", PICTURE_S
            ),
            "decode_s": histogram("stepweave_worker_decode_seconds", "Latents to a picture.", STAGE_S),
            "image_s": histogram("stepweave_worker_image_seconds", "Writing the picture's file.", STAGE_S),
        }
        self._requests = Counter(
            "stepweave_worker_requests_total",
            "Requests that it is through with: completed (its gateway has the picture), or error and its code.",
            ("model", "outcome", "code"),
            registry=registry,
        )
        for outcome, code in (("completed", ""), *(("error", code) for code in get_args(ErrorCode))):
            self._requests.labels(model, outcome, code)
        self._model = model

    def stepped(self, result: StepResult) -> None:
        """A step boundary."""
        for timing in result.timings:
            self._step_seconds.observe(timing.seconds)
            self._step_rows.observe(timing.rows)
        if result.idle_s > 0:  # 0: nothing ran, or it was the first step, which ends no gap
            self._idle_seconds.observe(result.idle_s)

    def request_ended(self, done: RequestDone) -> None:
        """A request is over, in whatever way but by being released. Stages are those of pictures that were finished."""
        code = done.error.code if done.error is not None else ""
        self._requests.labels(self._model, done.outcome, code).inc()
        if done.outcome == "completed":
            for stage, histogram in self._stages.items():
                histogram.observe(getattr(done.timings, stage))

    def watch(
        self,
        me: Introduction,
        session: Session,
        residents: Residents,
        delivery: Delivery,
        prompts: PromptCounts | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """From now on these are read at each scrape."""

        def read() -> Iterator[Reading]:
            yield Reading("stepweave_worker_info", 1, (me.worker_id, me.profile.model, me.device))
            phases = Count(resident.phase for resident in residents.snapshot())
            for phase in get_args(ResidentPhase):
                yield Reading("stepweave_worker_residents", phases[phase], (phase,))
            yield Reading("stepweave_worker_credit_stalled", delivery.stalled)
            yield Reading("stepweave_worker_images_acknowledged_total", delivery.acknowledged)
            yield Reading("stepweave_worker_images_sent_again_total", delivery.sent_again)
            if prompts is not None:
                yield Reading("stepweave_worker_prompts_encoded_total", prompts.encoded)
                yield Reading("stepweave_worker_prompts_reused_total", prompts.reused)
            yield Reading("stepweave_worker_malformed_frames_total", session.malformed, ("control",))
            yield Reading("stepweave_worker_malformed_frames_total", delivery.malformed, ("data",))

        self._registry.register(OnScrape(FAMILIES, read, loop))
