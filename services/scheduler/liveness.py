"""When to look whether a peer has gone silent.

Role: for each peer one entry in a heap, moved on lazily, so that hearing of a peer costs one assignment and a tick
looks only at those that are due. It must not know what silence means; that is the caller's.
"""

import heapq
from typing import Generic, Protocol, TypeVar


class Peer(Protocol):
    """What is watched."""

    number: int  # unique among all that are watched together

    def silent_from(self) -> float:
        """When, if it says nothing more, its silence next has a consequence."""
        ...


P = TypeVar("P", bound=Peer)


class Watch(Generic[P]):
    """Peers in the order in which they must be looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, P]] = []
        self._due: dict[int, float] = {}  # by number, the one entry of the heap that counts; others are stale

    def add(self, peer: P) -> None:
        """Watches `peer`. One that is watched already is looked at by its present `silent_from`, be that earlier."""
        due = peer.silent_from()
        self._due[peer.number] = due
        heapq.heappush(self._heap, (due, peer.number, peer))

    def next_deadline(self) -> float | None:
        """When to call `take_due`. It may be too early, never too late."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[P]:
        """Takes out, and no longer watches, the peers whose silence has a consequence by `now`."""
        due: list[P] = []
        while self._heap and self._heap[0][0] <= now:
            when, number, peer = heapq.heappop(self._heap)
            if self._due.get(number) != when:
                continue
            if peer.silent_from() <= now:
                del self._due[number]
                due.append(peer)
            else:
                self.add(peer)
        return due
