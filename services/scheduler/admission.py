"""Whether a call's requests are taken.

Role: the answer to `SubmitRequests`. It must not know plans or sockets.
"""

from collections.abc import Container

from msgspec import structs

from common import messages as m
from common.errors import ErrorCode, ErrorInfo
from common.params import DiffusionRequest
from services.scheduler.book import RequestBook
from services.scheduler.cost import step_share_s, steps_ahead
from services.scheduler.key import request_shape
from services.scheduler.workers import Fleet, Model

MIN_RETRY_AFTER_S = 1.0


def submit(
    book: RequestBook,
    fleet: Fleet,
    message: m.SubmitRequests,
    on_workers: Container[str],
    reconciling: bool,
    now: float,
) -> list[m.RequestUpdate]:
    """Admits the new requests of a call, all or none; says where the known ones stand.

    A call of which its gateway claims one request, or of which a worker holds one (`on_workers`, by request id), was
    accepted by an earlier scheduler, all of it: it is not refused. While `reconciling`, shortly after the scheduler's
    start, a model that is not known may have workers that have not said hello yet: its requests wait.
    What is admitted is told by the book. The answers are refusals, which are not remembered, and the last words on
    requests that have ended.
    """
    answers: list[m.RequestUpdate] = []
    new: dict[str, DiffusionRequest] = {}
    for request in message.requests:
        known = book.live.get(request.request_id)
        finished = book.finished.get(request.request_id)
        if known is not None and known.gateway_id == message.gateway_id:
            book.tell(known, now)
        elif finished is not None:
            answers.append(finished.update(request.request_id))
        else:
            new[request.request_id] = request
    claims = {claim.request_id: _true(claim, fleet) for claim in message.claims}
    accepted = any(request_id in claims or request_id in on_workers for request_id in new)
    refusal = _refusal(book, fleet, message, new, accepted, reconciling)
    if refusal is not None:
        error, retry_after_s = refusal
        return answers + [
            m.RequestUpdate(request_id, "finished_error", error=error, retry_after_s=retry_after_s)
            for request_id in new
        ]
    call = next(iter(new), "")
    for request_id, request in new.items():
        work_s = _work_s(fleet.models.get(request.model), request)
        book.admit(request, work_s, now, call=call, accepted_before=accepted, claim=claims.get(request_id))
    return answers


def _true(claim: m.RequestClaim, fleet: Fleet) -> m.RequestClaim:
    """What a gateway last heard, without deaths of workers that have spoken since."""
    died_on = tuple(worker_id for worker_id in claim.died_on if worker_id not in fleet.workers)
    return structs.replace(claim, died_on=died_on)


def refuse_unknown_models(book: RequestBook, fleet: Fleet, now: float) -> None:
    """Ends the waiting requests of models of which no worker has said hello, but for those accepted before."""
    for model, requests in book.queue.models().items():
        if model not in fleet.models:
            error = _error("no_worker", f"no worker serves the model {model!r} at present")
            for request in requests:
                if not request.accepted_before:
                    book.finish(request, "finished_error", now, "reconciled without a worker", error)


def weigh(book: RequestBook, fleet: Fleet, model_name: str) -> None:
    """The first worker of a model has said what its steps cost: so has the work that waits."""
    model = fleet.models[model_name]
    for request in book.queue.waiting(model_name):
        book.queue.weigh(request, _work_s(model, request.request))
    for held in book.held.values():
        for request in held.values():
            if request.request.model == model_name:
                request.queued_work_s = _work_s(model, request.request)


def _refusal(
    book: RequestBook,
    fleet: Fleet,
    message: m.SubmitRequests,
    new: dict[str, DiffusionRequest],
    accepted: bool,
    reconciling: bool,
) -> tuple[ErrorInfo, float | None] | None:
    for request_id, request in new.items():
        if request.home.gateway_id != message.gateway_id or request_id in book.live:
            return _error("invalid_request", f"request {request_id} belongs to another gateway"), None
    if accepted:  # it had its place in the queue, and its worker may say hello later than its gateway
        return None
    for request in new.values():
        model = fleet.models.get(request.model)
        if model is None and reconciling:
            continue
        if model is None:
            return _error("model_not_found", f"no worker serves the model {request.model!r}"), None
        if not model.workers:
            text = f"no worker serves the model {request.model!r} at present"
            return _error("no_worker", text), MIN_RETRY_AFTER_S
    count = len(new)
    if count > book.queue.max_waiting:
        text = f"a call of {count} pictures can never be taken: the queue's limit is {book.queue.max_waiting}"
        return ErrorInfo("invalid_request", text, "n"), None
    if count and not book.has_room_for(count):
        workers = max(len(fleet.workers), 1)
        retry_after_s = max(book.queue.work_s / workers, MIN_RETRY_AFTER_S)
        return _error(
            "queue_full", f"the queue is full: {book.waiting} of {book.queue.max_waiting} requests wait"
        ), retry_after_s
    return None


def _error(code: ErrorCode, message: str) -> ErrorInfo:
    return ErrorInfo(code=code, message=message)


def _work_s(model: Model | None, request: DiffusionRequest) -> float:
    """Seconds that the request takes of a worker, by the cost of the one known longest; 0 where none is known."""
    worker = next(iter(model.workers.values()), None) if model is not None else None
    if worker is None:
        return 0.0
    shape = request_shape(request.params, worker.hello.profile)
    return steps_ahead(request.params, worker.hello) * step_share_s(request.params, shape, worker.hello)
