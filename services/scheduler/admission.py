"""Whether a call's requests are taken.

Role: the answer to `SubmitRequests`. It must not know plans or sockets.
"""

from common import messages as m
from common.errors import ErrorCode, ErrorInfo
from common.params import DiffusionRequest
from services.scheduler.book import RequestBook
from services.scheduler.cost import step_share_s
from services.scheduler.key import request_shape
from services.scheduler.workers import Fleet, Model

MIN_RETRY_AFTER_S = 1.0


def submit(book: RequestBook, fleet: Fleet, message: m.SubmitRequests, now: float) -> list[m.RequestUpdate]:
    """Admits the new requests of a call, all or none; says where the known ones stand.

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
            answers.append(finished.update)
        else:
            new[request.request_id] = request
    claimed = {claim.request_id: claim.attempt for claim in message.claims}
    refusal = _refusal(book, fleet, message, new, claimed)
    if refusal is not None:
        error, retry_after_s = refusal
        return answers + [
            m.RequestUpdate(request_id, "finished_error", error=error, retry_after_s=retry_after_s)
            for request_id in new
        ]
    for request_id, request in new.items():
        book.admit(request, claimed.get(request_id, 0), _work_s(fleet.models.get(request.model), request), now)
    return answers


def _refusal(
    book: RequestBook,
    fleet: Fleet,
    message: m.SubmitRequests,
    new: dict[str, DiffusionRequest],
    claimed: dict[str, int],
) -> tuple[ErrorInfo, float | None] | None:
    for request_id, request in new.items():
        if request.home.gateway_id != message.gateway_id or request_id in book.live:
            return _error("invalid_request", f"request {request_id} belongs to another gateway"), None
        if request_id in claimed:  # it was accepted once; after a restart its worker may be later than its gateway
            continue
        model = fleet.models.get(request.model)
        if model is None:
            return _error("model_not_found", f"no worker serves the model {request.model!r}"), None
        if not model.workers:
            text = f"no worker serves the model {request.model!r} at present"
            return _error("no_worker", text), MIN_RETRY_AFTER_S
    # What was accepted once, by an earlier epoch, is not refused.
    count = sum(request_id not in claimed for request_id in new)
    if count > book.queue.max_waiting:
        text = f"a call of {count} pictures can never be taken: the queue's limit is {book.queue.max_waiting}"
        return ErrorInfo("invalid_request", text, "n"), None
    if count and not book.queue.has_room_for(count):
        workers = max(len(fleet.workers), 1)
        retry_after_s = max(book.queue.work_s / workers, MIN_RETRY_AFTER_S)
        return _error(
            "queue_full", f"the queue is full: {len(book.queue)} of {book.queue.max_waiting} requests wait"
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
    return request.params.num_inference_steps * step_share_s(shape, worker.hello.cost, worker.limits)
