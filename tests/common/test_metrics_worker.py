"""What a worker tells Prometheus, and what its log says of a request. No model and no torch are needed for it."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from common import messages as m
from common.errors import ErrorInfo, RequestError
from common.metrics import new_registry
from common.params import DiffusionRequest
from services.worker.delivery import Delivery
from services.worker.metrics import WorkerMetrics
from services.worker.residents import Residents
from services.worker.session import Introduction
from services.worker.step_thread import Boundary
from tests.builders import WORKER, profile, request
from tests.common.scraping import of
from tests.worker.peers import DEADLINE_S, FakeGateway, zmq_context

TIMINGS = m.StageTimings(encode_s=0.1, denoise_s=1.0, decode_s=0.2, image_s=0.05)


def test_steps_rows_and_gaps() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "demo")
    metrics.stepped(m.StepResult(WORKER, "boot", 1, timings=(m.GroupTiming(1, 2, 128, 0.02),)))
    timings = (m.GroupTiming(3, 6, 384, 0.05), m.GroupTiming(1, 1, 64, 0.01))
    metrics.stepped(m.StepResult(WORKER, "boot", 2, timings=timings, idle_s=0.0002))
    metrics.stepped(m.StepResult(WORKER, "boot", 3))  # nothing ran
    found = of(registry)
    assert found.total("stepweave_worker_step_seconds_count", model="demo") == 3
    assert found.total("stepweave_worker_step_rows_sum") == 9
    assert found.total("stepweave_worker_step_rows_bucket", le="2.0") == 2
    assert found.total("stepweave_worker_idle_seconds_count") == 1
    assert found.total("stepweave_worker_idle_seconds_bucket", le="0.0003") == 1


def test_outcomes_and_stages() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "demo")
    before = of(registry).counted()
    metrics.request_ended(m.RequestDone(WORKER, "r1", 1, "completed", timings=TIMINGS))
    failed = m.RequestDone(WORKER, "r2", 1, "error", ErrorInfo("non_finite", "no numbers"), TIMINGS)
    metrics.request_ended(failed)
    found = of(registry)
    assert found.total("stepweave_worker_requests_total", outcome="completed", code="") == 1
    assert found.total("stepweave_worker_requests_total", outcome="error", code="non_finite") == 1
    for stage in ("encode", "denoise", "decode", "image"):
        assert found.total(f"stepweave_worker_{stage}_seconds_count") == 1
    assert found.counted() == before, "a rate misses the event with which a series begins"


class FakeSide:
    """Prepares and decodes at once; a prompt "fail STAGE" fails there."""

    async def prepare(self, asked: DiffusionRequest, attempt: int) -> Any:
        _fail_if_asked(asked, "prepare")
        timings = SimpleNamespace(encode_s=0.1, denoise_s=0.0, decode_s=0.0, image_s=0.0)
        return SimpleNamespace(
            request=asked,
            request_id=asked.request_id,
            attempt=attempt,
            step_index=0,
            total_steps=4,
            timings=timings,
            warnings=(),
        )

    async def decode(self, state: Any) -> Any:
        _fail_if_asked(state.request, "decode")
        state.timings.decode_s = 0.2
        return "picture"

    async def write(self, state: Any, image: Any) -> bytes:
        return b"file"


def _fail_if_asked(asked: DiffusionRequest, stage: str) -> None:
    if asked.params.prompt == f"fail {stage}":
        raise RequestError(ErrorInfo("generation_failed", "as it was asked to"))


class NoSteps:
    """Where states go to be denoised."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}

    def add(self, state: Any) -> None:
        self.states[state.request_id] = state

    def release(self, request_id: str, attempt: int) -> None:
        self.states.pop(request_id, None)


async def test_a_worker_tells_of_its_requests_its_pictures_and_its_links() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "demo")
    async with zmq_context() as context:
        gateway = FakeGateway(context, acknowledges=False)
        delivery = Delivery(context, WORKER, resend_s=0.02)
        steps, sent = NoSteps(), []
        residents = Residents(WORKER, FakeSide(), steps, delivery, sent.append, lambda: 1, metrics.request_ended)
        me = Introduction(WORKER, profile(), m.StepCost(0.01, 1e-5), m.WorkerLimits(4, 8), "cpu")
        # Sockets and models that this test has no use for; of them only these numbers are read.
        session, prompts = SimpleNamespace(malformed=3), SimpleNamespace(encoded=5, reused=2)
        metrics.watch(me, session, residents, delivery, prompts, asyncio.get_running_loop())  # type: ignore[arg-type]

        with capture_logs() as lines:
            names = {"r1": "red apple", "r2": "fail prepare", "r3": "fail decode", "r4": "red apple", "r5": "red apple"}
            for name, prompt in names.items():
                residents.admit(m.NewRequest(request(name, home=gateway.home, prompt=prompt), 2))
            async with asyncio.timeout(DEADLINE_S):
                while len(steps.states) < 4:
                    await asyncio.sleep(0)
            for name in ("r1", "r3", "r5"):
                steps.states[name].step_index = 4 if name != "r5" else 2
            finished = tuple(steps.states[name] for name in ("r1", "r3"))
            failure = m.Failure("r5", 2, ErrorInfo("non_finite", "no numbers"))
            residents.on_boundary(Boundary(m.StepResult(WORKER, "boot", 1, failed=(failure,)), finished))
            await gateway.until(lambda: len(gateway.pictures("r1")) >= 3)
            gateway.link.send(m.Welcome("boot"), to=WORKER)  # no message of a data link
            gateway.acknowledge(gateway.received[0])
            async with asyncio.timeout(DEADLINE_S):
                while len(residents.snapshot()) > 1 or not delivery.malformed:
                    await asyncio.sleep(0)

        found = await asyncio.to_thread(of, registry)
        residents.release(m.ReleasedRequest("r4", 2, "aborted"))
        await residents.close()
        delivery.close()
        gateway.close()

    assert found.labels("stepweave_worker_info") == [{"worker_id": WORKER, "model": "demo", "device": "cpu"}]
    for phase, count in {"preparing": 0, "denoising": 1, "decoding": 0}.items():
        assert found.total("stepweave_worker_residents", phase=phase) == count
    assert found.total("stepweave_worker_images_acknowledged_total") == 1
    assert found.total("stepweave_worker_images_sent_again_total") >= 2
    assert found.total("stepweave_worker_malformed_frames_total", link="data") == 1
    assert found.total("stepweave_worker_malformed_frames_total", link="control") == 3
    assert found.total("stepweave_worker_prompts_encoded_total") == 5
    assert found.total("stepweave_worker_prompts_reused_total") == 2
    assert found.total("stepweave_worker_credit_stalled") == 0
    assert found.total("stepweave_worker_requests_total", outcome="completed") == 1
    assert found.total("stepweave_worker_requests_total", outcome="error", code="generation_failed") == 2
    assert found.total("stepweave_worker_requests_total", outcome="error", code="non_finite") == 1

    told = [line for line in lines if line["event"] in ("admitted", "failed", "completed", "released")]
    assert {(line["event"], line["request_id"], line["attempt"], line["step"]) for line in told} == {
        *(("admitted", name, 2, 0) for name in names),
        ("completed", "r1", 2, 4),
        ("failed", "r2", 2, 0),
        ("failed", "r3", 2, 4),
        ("failed", "r5", 2, 2),
    }


def test_no_torch_was_needed() -> None:
    """Else a worker's metrics could not be named where the dashboards are checked."""
    program = "import sys, services.worker.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
