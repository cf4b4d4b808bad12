"""A request as the scheduler knows it, and the rules of its life.

Role: the lifecycle as a table, the record of one request, and the one function that moves a record along the table.
It owns a request's status and where it stands; it must not know queues, sockets, other requests or tensors.

Theory of operation. A request waits in a queue until a worker has room for it. There its prompt is prepared, which
makes it ready; the first plan that runs it makes it running. A plan that leaves it out while it is part-way preempts
it. With all of its steps done it is decoded and delivered, which completes it. Its client may abort it, and it may
fail, at any time. If its worker is lost it waits again, at its old place in the queue.

After the scheduler has started again, a request that a worker still holds is found there instead of being dispatched,
and passes at once to where the worker has brought it. Until that worker has said so it waits, held outside the queue.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from common.messages import RequestClaim, RequestStatus
from common.params import DiffusionRequest

STORY_LENGTH = 16  # transitions that a request remembers


class Transition(NamedTuple):
    """One line of the lifecycle table."""

    source: RequestStatus
    target: RequestStatus
    when: str


LIVE: tuple[RequestStatus, ...] = ("waiting", "preparing", "ready", "running", "preempted", "decoding")
ON_WORKER: tuple[RequestStatus, ...] = LIVE[1:]
FINISHED: tuple[RequestStatus, ...] = ("finished_completed", "finished_aborted", "finished_error")

TRANSITIONS: tuple[Transition, ...] = (
    Transition("waiting", "preparing", "dispatched to a worker, or found on one"),
    Transition("preparing", "ready", "prepared"),
    Transition("ready", "running", "a plan runs it"),
    Transition("running", "preempted", "a plan leaves it out"),
    Transition("preempted", "running", "a plan runs it again"),
    Transition("running", "decoding", "last step done"),
    Transition("decoding", "finished_completed", "delivered"),
    *(Transition(status, "waiting", "worker lost") for status in ON_WORKER),
    *(Transition(status, "finished_aborted", "aborted") for status in LIVE),
    *(Transition(status, "finished_error", "failed") for status in LIVE),
)

_LEGAL = frozenset((line.source, line.target) for line in TRANSITIONS)


class Episode(NamedTuple):
    """One transition that took place."""

    now: float
    source: RequestStatus
    target: RequestStatus
    cause: str


@dataclass(slots=True, eq=False)
class Request:
    """One live request. The steps are those of the present attempt."""

    request: DiffusionRequest
    number: int  # arrival order over all requests; its place in the queue, also after a worker was lost
    attempt: int = 0  # dispatches of it that any scheduler epoch knows of; echoed by workers
    dispatches: int = 0  # dispatches of it in this epoch
    status: RequestStatus = "waiting"
    worker_id: str = ""  # where it is resident, empty while it waits
    step_index: int = 0  # denoise steps behind it, as its worker confirmed
    total_steps: int = 0  # length of its timestep schedule, 0 until it is prepared
    planned_step: int = 0  # highest `until_step` that any plan has given it, never less than `step_index`
    queued_work_s: float = 0.0  # what it adds to the queue's work while it waits
    died_on: tuple[str, ...] = ()  # workers that died with it, and may have died of it
    died_at_step: int | None = None  # the last of them died at this step of it at the latest; None: later, or not known
    call: str = ""  # what it shares with the requests that were submitted together with it
    accepted_before: bool = False  # by an earlier scheduler: it is refused nothing
    # While it is held for a worker that an earlier scheduler had it on: what its gateway last heard of it. Else None.
    claim: RequestClaim | None = None
    held_until: float = 0.0  # when it is held no more, if it is held
    updated_at: float = 0.0  # when its gateway was last told
    story: deque[Episode] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def on_trial(self) -> bool:
        """Whether a worker may have died of it, as far as is known."""
        return bool(self.died_on)

    @property
    def gateway_id(self) -> str:
        """The gateway that took it, which alone hears of it and may abort it."""
        return self.request.home.gateway_id

    def tell(self) -> str:
        """Its recent story, one line a transition, for people."""
        lines = [f"  {e.now:.3f} s: {e.source} -> {e.target} ({e.cause})" for e in self.story]
        head = f"request {self.request_id}, attempt {self.attempt}, step {self.step_index}/{self.total_steps}"
        head += f", planned {self.planned_step}, worker {self.worker_id or 'none'}, now {self.status}"
        return "\n".join([head, *lines])


class InvalidTransition(Exception):  # noqa: N818 (it names what happened, as in the field)
    """A move that the table does not know. The request is unchanged; the text tells its recent story."""

    def __init__(self, request: Request, target: RequestStatus, cause: str) -> None:
        super().__init__(f"{request.status} -> {target} ({cause}) is no transition\n{request.tell()}")
        self.request_id = request.request_id
        self.source = request.status
        self.target = target


def transition(request: Request, target: RequestStatus, now: float, cause: str) -> None:
    """Moves `request` to `target`. Raises `InvalidTransition`, and changes nothing, if the table forbids it."""
    if (request.status, target) not in _LEGAL:
        raise InvalidTransition(request, target, cause)
    request.story.append(Episode(now, request.status, target, cause))
    request.status = target


def render_lifecycle() -> str:
    """The table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> waiting: submitted"]
    lines += [f"    {line.source} --> {line.target}: {line.when}" for line in TRANSITIONS]
    lines += [f"    {status} --> [*]" for status in FINISHED]
    return "\n".join(lines) + "\n"
