"""What the scheduler tells Prometheus, seen from outside its core."""

import asyncio
import contextlib

import zmq.asyncio
from structlog.testing import capture_logs

from common import codec, transport
from common import messages as m
from common.config import SchedulerConfig
from common.errors import ErrorInfo, ProtocolError
from common.metrics import new_registry
from services.scheduler.core import Event, SchedulerCore, Send
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.service import SchedulerShell, serve_scheduler
from tests.builders import GATEWAY, WORKER, gateway_hello, request, submit, worker_hello
from tests.common.scraping import Scraped, of, scrape
from tests.common.test_metrics import free_port
from tests.scheduler.driver import BOOT, Driver, plans

DEADLINE_S = 10.0


class Watched(Driver):
    """A driver whose core is looked at as the shell lets it be."""

    def __init__(self, **core: object) -> None:
        super().__init__(**core)
        self.registry = new_registry()
        self._metrics = SchedulerMetrics(self.registry)
        self.gateway()
        self.worker()

    def handle(self, event: Event) -> list[Send]:
        sends = super().handle(event)
        self._metrics.handled(self.core, event, sends, self.now)
        return sends

    def scraped(self) -> Scraped:
        return of(self.registry)


def complete(driver: Watched, request_id: str) -> None:
    """Takes a request of one step to its end."""
    driver.ready(request_id)
    driver.result(driver.newest(), {request_id: 1})
    driver.done(request_id)


def test_each_accepted_request_is_counted_once_with_its_outcome() -> None:
    driver = Watched()
    before = driver.scraped().counted()
    asked = [request(f"r{index}", num_inference_steps=1) for index in range(4)]
    driver.submit(*asked)
    complete(driver, "r0")
    complete(driver, "r1")
    driver.ready("r2")
    driver.done("r2", error=ErrorInfo("out_of_memory", "too large"))
    driver.abort("r3")
    driver.submit(*asked)  # a gateway that missed the answers asks again, and is told again
    driver.abort("r3")
    name = "stepweave_scheduler_requests_total"
    assert driver.scraped().total(name, outcome="completed") == 2
    assert driver.scraped().total(name, outcome="error", code="out_of_memory") == 1
    assert driver.scraped().total(name, outcome="aborted") == 1
    assert driver.scraped().total(name) == 4
    assert driver.scraped().total("stepweave_scheduler_refusals_total") == 0
    assert driver.scraped().counted() == before, "a rate misses the event with which a series begins"


def test_refusals_are_counted_apart_by_reason() -> None:
    driver = Watched(max_queue=3)
    before = driver.scraped().counted()
    driver.submit(request("r1", model="unheard-of"))
    driver.submit(*(request(f"q{index}") for index in range(4)))
    for index in range(30):  # more than a worker and the queue hold
        driver.submit(request(f"p{index}"))
    scraped = driver.scraped()
    assert scraped.total("stepweave_scheduler_refusals_total", code="model_not_found") == 1
    assert scraped.total("stepweave_scheduler_refusals_total", code="invalid_request") == 4
    assert scraped.total("stepweave_scheduler_refusals_total", code="queue_full") > 0
    assert scraped.total("stepweave_scheduler_requests_total") == 0
    assert scraped.counted() == before


def test_what_a_lost_worker_held_is_counted_as_queued_again() -> None:
    driver = Watched()
    driver.submit(request("r1"), request("r2"))
    assert driver.scraped().total("stepweave_scheduler_requeues_total") == 0
    driver.handle(m.WorkerDraining(WORKER, BOOT, leaving=True))
    assert driver.scraped().total("stepweave_scheduler_requeues_total") == 2


def test_plan_lag_is_from_sending_a_plan_to_the_first_word_that_it_has_arrived() -> None:
    driver = Watched()
    driver.submit(request("r1", num_inference_steps=3))
    assert (
        driver.scraped().total("stepweave_scheduler_plan_lag_seconds_count") == 0
    )  # nothing to run is no plan to wait for
    (first, *_) = plans(driver.ready("r1"))
    sent = driver.newest()
    driver.now += 0.25
    driver.result(first.step_id, {"r1": 1}, last=sent)
    scraped = driver.scraped()
    assert scraped.total("stepweave_scheduler_plan_lag_seconds_count") == 1
    assert scraped.total("stepweave_scheduler_plan_lag_seconds_sum") == 0.25
    assert scraped.total("stepweave_scheduler_plans_total") >= 2


def test_nothing_is_kept_of_workers_that_are_gone() -> None:
    driver = Watched()
    for life in range(50):
        worker_id = f"worker-{life}"
        driver.worker(worker_id)
        driver.submit(request(f"r{life}", num_inference_steps=1))
        for request_id, record in list(driver.core.book.live.items()):
            if record.worker_id == worker_id:
                driver.ready(request_id, worker_id, attempt=record.attempt)
        driver.handle(m.WorkerDraining(worker_id, BOOT, leaving=True))
    assert len(driver._metrics._unheard) <= 2


async def test_state_is_read_when_it_is_asked_for() -> None:
    def raise_malformed(sender: str, error: ProtocolError) -> None:
        raise AssertionError(error)

    port = free_port()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = SchedulerConfig(bind="tcp://127.0.0.1:*", metrics_port=port)
    server = asyncio.create_task(serve_scheduler(config, bound.set_result))
    context = zmq.asyncio.Context()
    try:
        endpoint = await asyncio.wait_for(bound, DEADLINE_S)
        worker = transport.dealer(context, endpoint, WORKER, codec.to_worker, raise_malformed)
        gateway = transport.dealer(context, endpoint, GATEWAY, codec.to_gateway, raise_malformed)
        worker.send(worker_hello(max_num_seqs=1, max_residents=2))
        await asyncio.wait_for(worker.receive(), DEADLINE_S)
        gateway.send(gateway_hello())
        gateway.send(submit(*(request(f"r{index}") for index in range(5))))
        noise = context.socket(zmq.DEALER)
        noise.setsockopt(zmq.LINGER, 0)
        noise.connect(endpoint)
        await noise.send(b"noise")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                scraped = await asyncio.to_thread(scrape, port)
                told = scraped.labels("stepweave_scheduler_live_requests")
                malformed = scraped.total("stepweave_scheduler_malformed_frames_total")
                if told and scraped.total("stepweave_scheduler_live_requests") == 5 and malformed == 1:
                    break
        requests = {label["status"]: scraped.total("stepweave_scheduler_live_requests", **label) for label in told}
        nobody = {"ready": 0, "running": 0, "preempted": 0, "decoding": 0}
        assert requests == {"waiting": 3, "preparing": 2} | nobody
        assert scraped.total("stepweave_scheduler_workers", model="demo", state="serving") == 1
        assert scraped.total("stepweave_scheduler_workers", state="suspect") == 0
        assert scraped.total("stepweave_scheduler_gateways") == 1
        assert scraped.total("stepweave_scheduler_queued_work_seconds") > 0
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server
        context.destroy(linger=0)


class Nowhere:
    """A link on which nothing is sent."""

    def send(self, message: m.Message, *, to: str = "") -> transport.SendOutcome:
        return transport.SendOutcome.SENT


def test_the_log_of_a_request_names_it_its_worker_and_its_step() -> None:
    shell = SchedulerShell(SchedulerCore(BOOT, update_interval_s=0.0), Nowhere())  # type: ignore[arg-type]
    for event in (
        gateway_hello(scheduler_boot_id=BOOT),
        worker_hello(scheduler_boot_id=BOOT),
        submit(request("r1"), request("r2")),
    ):
        shell.handle(event)
    shell.handle(m.RequestReady(WORKER, "r1", 1, 0, 4, last_step_id=2))
    shell.handle(m.RequestReady(WORKER, "r2", 1, 0, 4, last_step_id=2))
    shell.handle(m.StepResult(WORKER, BOOT, 2, progress=(m.Progress("r1", 1, 3), m.Progress("r2", 1, 2))))
    with capture_logs() as lines:
        shell.handle(m.RequestDone(WORKER, "r1", 1, "error", ErrorInfo("non_finite", "not a number")))
        shell.handle(m.WorkerDraining(WORKER, BOOT, leaving=True, reason="stopped"))
    (failed,) = [line for line in lines if line["event"] == "failed or refused"]
    assert (failed["request_id"], failed["worker_id"], failed["attempt"], failed["step"]) == ("r1", WORKER, 1, 3)
    (moved,) = [line for line in lines if line["event"] == "to be dispatched again"]
    assert (moved["request_id"], moved["worker_id"], moved["attempt"], moved["step"]) == ("r2", WORKER, 1, 2)
    assert WORKER in moved["reason"]
