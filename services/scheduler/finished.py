"""How requests ended, for a bounded time: `FinishedRequests`.

Role: the answer to a gateway that submits once more what has ended already, so that nothing is drawn twice. Records
only; it must not know live requests. There may be very many, so each takes little: about a quarter of a kilobyte.
"""

from collections import deque

from msgspec import Struct

from common.errors import ErrorInfo
from common.messages import RequestStatus, RequestUpdate


class Finished(Struct, frozen=True, gc=False):
    """How one request ended."""

    until: float  # when it is forgotten
    status: RequestStatus
    attempt: int
    worker_id: str
    error: ErrorInfo | None
    died_on: tuple[str, ...]

    def update(self, request_id: str) -> RequestUpdate:
        """The last word on it, once more."""
        return RequestUpdate(
            request_id=request_id,
            status=self.status,
            attempt=self.attempt,
            worker_id=self.worker_id,
            error=self.error,
            died_on=self.died_on,
        )


class FinishedRequests:
    """The memory of requests that have ended: each for `for_s` seconds, and `most` of them at once."""

    def __init__(self, for_s: float, most: int) -> None:
        self._for_s = for_s
        self._most = most
        self._by_id: dict[str, Finished] = {}
        self._order: deque[str] = deque()  # the ids, in the order in which they ended

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Finished | None:
        return self._by_id.get(request_id)

    def remember(self, last: RequestUpdate, now: float) -> None:
        """A request ends, with this update. Its first end counts: two workers may bring a picture of one request."""
        if last.request_id in self._by_id:
            return
        self._order.append(last.request_id)
        self._by_id[last.request_id] = Finished(
            now + self._for_s, last.status, last.attempt, last.worker_id, last.error, last.died_on
        )
        if len(self._order) > self._most:
            del self._by_id[self._order.popleft()]

    def forget(self, now: float) -> None:
        """Lets go of those whose time is over."""
        while self._order and self._by_id[self._order[0]].until <= now:
            del self._by_id[self._order.popleft()]
