"""The requests that a worker holds, each with the task that takes it from its prompt to its gateway.

Role: the table of residents, and the story of one request: prepare, denoise, wait for credit, decode, write, deliver.
It lives on the event loop. The step index is the state's own; the table has no second truth of it. It knows messages
and coroutines, neither sockets nor tensors.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from common.errors import ErrorInfo, RequestError
from common.messages import (
    ImageOutput,
    Message,
    NewRequest,
    ReleasedRequest,
    RequestDone,
    RequestReady,
    Resident,
    ResidentPhase,
    StageTimings,
)
from common.params import DataHome, DiffusionRequest
from services.worker.step_thread import Boundary

log = structlog.get_logger()

REMEMBERED = 4_000  # requests that are over, whose `new` may still come again


class Side(Protocol):
    """What is done beside the denoise loop; `SideExecutor` in production."""

    async def prepare(self, request: DiffusionRequest, attempt: int) -> Any: ...

    async def decode(self, state: Any) -> Any: ...

    async def write(self, state: Any, decoded: Any) -> bytes: ...


class Steps(Protocol):
    """Where prepared requests are denoised; `StepThread` in production."""

    def add(self, state: Any) -> None: ...

    def release(self, request_id: str, attempt: int) -> None: ...


class Deliverer(Protocol):
    """How pictures leave; `Delivery` in production."""

    async def wait_for_credit(self, home: DataHome) -> None: ...

    async def deliver(self, home: DataHome, output: ImageOutput, payload: bytes) -> None: ...


class _Record:
    """One resident."""

    def __init__(self, request: DiffusionRequest, attempt: int) -> None:
        self.request = request
        self.attempt = attempt
        self.phase: ResidentPhase = "preparing"
        self.state: Any = None  # once it is prepared
        self.denoised = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Residents:
    """The table. `send` puts a message on the control link; `last_step_id` is of the newest plan received."""

    def __init__(
        self,
        worker_id: str,
        side: Side,
        steps: Steps,
        delivery: Deliverer,
        send: Callable[[Message], None],
        last_step_id: Callable[[], int],
        on_ended: Callable[[RequestDone], None] = lambda done: None,
    ) -> None:
        self._worker_id = worker_id
        self._side = side
        self._steps = steps
        self._delivery = delivery
        self._send = send
        self._last_step_id = last_step_id
        self._on_ended = on_ended  # told of each request that is over and was not released
        self._records: dict[str, _Record] = {}
        # What was said of requests that are over, by (request_id, attempt); None: they were released.
        self._over: OrderedDict[tuple[str, int], RequestDone | None] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()

    def snapshot(self) -> tuple[Resident, ...]:
        """All residents as they stand now."""
        return tuple(_resident(record) for record in self._records.values())

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def admit(self, new: NewRequest) -> None:
        """Takes a request in. A repetition is ignored, or answered again if the request is over; a newer attempt
        takes the place of an older one."""
        request_id = new.request.request_id
        key = (request_id, new.attempt)
        if key in self._over:
            done = self._over[key]
            if done is not None:
                self._send(done)
            return
        resident = self._records.get(request_id)
        if resident is not None:
            if resident.attempt >= new.attempt:
                return
            self._drop(resident)
        record = _Record(new.request, new.attempt)
        self._records[request_id] = record
        self._empty.clear()
        record.task = asyncio.create_task(self._serve(record), name=f"request {request_id}")
        log.debug("admitted", **_who(record))

    def release(self, released: ReleasedRequest) -> None:
        """Forgets a request, whatever is being done with it. Unknown ones are ignored."""
        self._remember((released.request_id, released.attempt), None)
        record = self._records.get(released.request_id)
        if record is not None and record.attempt == released.attempt:
            self._drop(record)
            log.debug("released", **_who(record), reason=released.reason)

    def on_boundary(self, boundary: Boundary) -> None:
        """Failures end their requests, which the step's own result reports; finished ones go on to decode."""
        for failure in boundary.result.failed:
            record = self._find(failure.request_id, failure.attempt)
            if record is not None:
                log.info("failed", **_who(record), code=failure.error.code)
                self._remember((failure.request_id, failure.attempt), self._done(record, failure.error))
                self._drop(record)
        for state in boundary.finished:
            record = self._find(state.request_id, state.attempt)
            if record is not None:
                record.denoised.set()

    async def close(self) -> None:
        """Drops everything, without a word to anybody."""
        tasks = [record.task for record in self._records.values() if record.task is not None]
        for record in list(self._records.values()):
            self._drop(record)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, request_id: str, attempt: int) -> _Record | None:
        record = self._records.get(request_id)
        return record if record is not None and record.attempt == attempt else None

    async def _serve(self, record: _Record) -> None:
        try:
            await self._make_and_deliver(record)
        except RequestError as error:
            log.info("failed", **_who(record), code=error.info.code)
            self._end(record, error.info)
        except Exception:  # a fault of ours in one request's story must not take the others with it
            log.exception("a request's task failed", **_who(record))
            self._end(record, ErrorInfo("internal", "the worker failed on this request"))
        else:
            self._end(record, None)

    async def _make_and_deliver(self, record: _Record) -> None:
        request, attempt = record.request, record.attempt
        state = await self._side.prepare(request, attempt)
        record.state = state
        record.phase = "denoising"
        self._steps.add(state)
        self._send(
            RequestReady(
                worker_id=self._worker_id,
                request_id=request.request_id,
                attempt=attempt,
                step_index=state.step_index,
                total_steps=state.total_steps,
                last_step_id=self._last_step_id(),
            )
        )
        await record.denoised.wait()
        record.phase = "decoding"
        # A picture that nobody takes is not even decoded: latents are much smaller.
        await self._delivery.wait_for_credit(request.home)
        decoded = await self._side.decode(state)
        data = await self._side.write(state, decoded)
        output = ImageOutput(
            request_id=request.request_id,
            attempt=attempt,
            worker_id=self._worker_id,
            output_format=request.output.output_format,
            width=request.params.width,
            height=request.params.height,
            nbytes=len(data),
            total_steps=state.total_steps,
            timings=_timings(record),
            warnings=state.warnings,
            num_frames=request.params.num_frames,
        )
        await self._delivery.deliver(request.home, output, data)
        log.info("completed", **_who(record))

    def _end(self, record: _Record, error: ErrorInfo | None) -> None:
        done = self._done(record, error)
        self._remember((done.request_id, done.attempt), done)
        self._drop(record)
        self._send(done)

    def _done(self, record: _Record, error: ErrorInfo | None) -> RequestDone:
        return RequestDone(
            worker_id=self._worker_id,
            request_id=record.request.request_id,
            attempt=record.attempt,
            outcome="completed" if error is None else "error",
            error=error,
            timings=_timings(record),
        )

    def _drop(self, record: _Record) -> None:
        del self._records[record.request.request_id]
        self._steps.release(record.request.request_id, record.attempt)
        if record.task is not None and record.task is not asyncio.current_task():
            record.task.cancel()
        if not self._records:
            self._empty.set()

    def _remember(self, key: tuple[str, int], done: RequestDone | None) -> None:
        if done is not None:
            self._on_ended(done)
        self._over.setdefault(key, done)
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)


def _who(record: _Record) -> dict[str, object]:
    """What each log line about a request says of it."""
    resident = _resident(record)
    return {"request_id": resident.request_id, "attempt": resident.attempt, "step": resident.step_index}


def _resident(record: _Record) -> Resident:
    state = record.state
    return Resident(
        request_id=record.request.request_id,
        attempt=record.attempt,
        phase=record.phase,
        step_index=0 if state is None else state.step_index,
        total_steps=0 if state is None else state.total_steps,
    )


def _timings(record: _Record) -> StageTimings:
    if record.state is None:
        return StageTimings()
    timings = record.state.timings
    return StageTimings(timings.encode_s, timings.denoise_s, timings.decode_s, timings.image_s)
