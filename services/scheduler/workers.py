"""The workers that the scheduler knows, and what each of them holds.

Role: the record of one worker (its residents, what it must still be told, the plans that it may be running) and the
fleet of all of them by id and model. It owns no request's status and makes no decision.
"""

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from common import messages as m
from services.scheduler.cost import step_share_s, steps_ahead
from services.scheduler.key import RequestShape, request_shape
from services.scheduler.request import Request

ReleaseReason = Literal["completed", "aborted", "error", "superseded"]


@dataclass(slots=True, eq=False)
class Residency:
    """One attempt of a request on one worker."""

    request: Request
    shape: RequestShape
    share_s: float  # seconds of the worker that one of its steps takes up
    found: bool = False  # the worker held it already, so no plan tells it of it
    first_step_id: int = 0  # first plan that told the worker of it, or came after it was found; 0 while none has
    work_s: float = 0.0  # its part of `Worker.work_s`
    on_trial: bool = False  # counted in `Worker.trials`


@dataclass(slots=True)
class Release:
    """Something that a worker must still be told to forget."""

    message: m.ReleasedRequest
    first_step_id: int = 0  # first plan that said so, 0 while none has


class SentPlan(Struct, frozen=True):
    """A plan that was sent and may be running, or yet run."""

    step_id: int
    groups: tuple[tuple[str, ...], ...]
    until: dict[str, int]  # until_step of each member that is still resident
    starts: Literal["after_current", "next_boundary"]


@dataclass(slots=True, eq=False)
class Worker:
    """One live worker."""

    hello: m.WorkerHello  # its newest
    number: int  # order in which workers became known
    suspect_after_s: float
    lost_after_s: float
    last_seen: float
    suspect: bool = False  # silent: gets nothing new
    draining: bool = False  # asked for nothing new
    claims_until: float = 0.0  # until then gateways may ask for what it held before it became known
    residents: dict[str, Residency] = field(default_factory=dict)  # by request id, in dispatch order
    # What it holds besides, from before it became known, and no gateway has asked for yet; by request id.
    unclaimed: dict[str, m.Resident] = field(default_factory=dict)
    work_s: float = 0.0  # seconds of work that its residents have left
    trials: int = 0  # residents that were on trial when they came, and have not been acquitted since
    has_completed: bool = False  # any request
    # What plans repeat until a plan that said it is confirmed.
    unconfirmed_new: dict[str, Residency] = field(default_factory=dict)
    unconfirmed_releases: dict[tuple[str, int], Release] = field(default_factory=dict)
    has_news: bool = False  # some of these two were in no plan yet
    # Plans in the order of their ids. The first is believed to run. The last, if there are two or more, is pending;
    # those between were replaced, but the worker may have begun one of them before it heard.
    outstanding: list[SentPlan] = field(default_factory=list)
    changed: bool = False  # something has happened since plans were last looked at
    resend: bool = False  # the newest plan seems lost
    newest_step_id: int = 0  # of all plans ever sent to it in this epoch
    newest_sent_at: float = 0.0
    running: tuple[str, ...] | None = None  # members of the running plan that statuses were last matched with

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def model(self) -> str:
        return self.hello.profile.model

    @property
    def limits(self) -> m.WorkerLimits:
        return self.hello.limits

    def has_room(self) -> bool:
        """Whether a waiting request may be sent to it."""
        return not (self.suspect or self.draining or self.is_full())

    def is_full(self) -> bool:
        """Whether it holds as many requests as it may, the unclaimed among them."""
        return 0 < self.limits.max_residents <= len(self.residents) + len(self.unclaimed)

    def silent_from(self) -> float:
        """When its silence makes it suspect, or lost if it is suspect."""
        return self.last_seen + (self.lost_after_s if self.suspect else self.suspect_after_s)

    def holds(self, request_id: str, attempt: int) -> Residency | None:
        """The residency, if this very attempt is on this worker."""
        residency = self.residents.get(request_id)
        return residency if residency is not None and residency.request.attempt == attempt else None

    def take(self, request: Request, found: bool = False) -> Residency:
        """Adds a resident, which the next plan will tell the worker of unless it was found there."""
        shape = request_shape(request.request.params, self.hello.profile)
        residency = Residency(request, shape, step_share_s(request.request.params, shape, self.hello), found)
        residency.on_trial = request.on_trial
        self.trials += residency.on_trial
        self.residents[request.request_id] = residency
        self.unconfirmed_new[request.request_id] = residency
        self.has_news = True
        self.running = None
        self.weigh(residency)
        return residency

    def drop(self, residency: Residency) -> None:
        """Removes a resident."""
        request_id = residency.request.request_id
        self.end_trial(request_id)
        del self.residents[request_id]
        self.unconfirmed_new.pop(request_id, None)
        for plan in self.outstanding:  # the same request may come back, as another attempt
            plan.until.pop(request_id, None)
        # A sum of differences drifts; no residents have no work for certain.
        self.work_s = self.work_s - residency.work_s if self.residents else 0.0
        self.changed = True
        self.running = None

    def end_trial(self, request_id: str) -> None:
        """A resident is on trial no more, if it was."""
        residency = self.residents[request_id]
        self.trials -= residency.on_trial
        residency.on_trial = False

    def forget(self, request_id: str, attempt: int) -> None:
        """Has the worker told to forget an attempt that it should not hold, unless it is being told already."""
        if (request_id, attempt) not in self.unconfirmed_releases:
            self.release(request_id, attempt, "superseded")

    def release(self, request_id: str, attempt: int, reason: ReleaseReason) -> None:
        """Has the worker told to forget an attempt."""
        message = m.ReleasedRequest(request_id=request_id, attempt=attempt, reason=reason)
        self.unconfirmed_releases[request_id, attempt] = Release(message)
        self.has_news = True

    def weigh(self, residency: Residency) -> None:
        """Brings its work up to date with the steps that `residency` has left."""
        request = residency.request
        steps = (request.total_steps or steps_ahead(request.request.params, self.hello)) - request.step_index
        work_s = steps * residency.share_s
        self.work_s += work_s - residency.work_s
        residency.work_s = work_s

    def confirm(self, last_step_id: int) -> None:
        """The worker has received the plan `last_step_id`, and so all that was in it."""
        if self.unconfirmed_new:
            for request_id, residency in list(self.unconfirmed_new.items()):
                if 0 < residency.first_step_id <= last_step_id:
                    del self.unconfirmed_new[request_id]
        if self.unconfirmed_releases:
            for key, release in list(self.unconfirmed_releases.items()):
                if 0 < release.first_step_id <= last_step_id:
                    del self.unconfirmed_releases[key]


@dataclass(slots=True, eq=False)
class Model:
    """One model name and the workers that serve it. It is remembered when they are gone."""

    profile: m.ModelProfile
    workers: dict[str, Worker] = field(default_factory=dict)
    open: dict[str, Worker] = field(default_factory=dict)  # those with room


class Fleet:
    """All live workers, by id and by model."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.models: dict[str, Model] = {}

    def add(self, worker: Worker) -> None:
        self.workers[worker.worker_id] = worker
        model = self.models.setdefault(worker.model, Model(worker.hello.profile))
        model.profile = worker.hello.profile
        model.workers[worker.worker_id] = worker
        self.refresh(worker)

    def remove(self, worker: Worker) -> None:
        del self.workers[worker.worker_id]
        model = self.models[worker.model]
        del model.workers[worker.worker_id]
        model.open.pop(worker.worker_id, None)

    def refresh(self, worker: Worker) -> None:
        """Brings the list of workers with room up to date with a change of `worker`."""
        open_workers = self.models[worker.model].open
        if worker.has_room():
            open_workers[worker.worker_id] = worker
        else:
            open_workers.pop(worker.worker_id, None)

    def conflicting_profile(self, hello: m.WorkerHello) -> bool:
        """Whether another live worker serves the same model name with another profile."""
        model = self.models.get(hello.profile.model)
        if model is None or model.profile == hello.profile:
            return False
        return any(worker_id != hello.worker_id for worker_id in model.workers)

    def status(self) -> tuple[m.ModelStatus, ...]:
        """Every model that was ever served, with the number of workers that take its requests; it may be 0."""
        return tuple(
            m.ModelStatus(profile=model.profile, workers=sum(not worker.draining for worker in model.workers.values()))
            for model in self.models.values()
        )
