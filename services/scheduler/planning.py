"""Plans ahead for one worker, so that it never waits for one.

Role: decides whether a worker needs a plan now, builds it, and keeps the list of plans that may be running. It owns
`Worker.outstanding` and `Request.planned_step`; it must not know queues, other workers or the lifecycle.

Theory of operation. A worker runs one plan and holds at most one more, the newest that it has received. While a plan
runs, the next is built from the state *projected* to the moment at which it starts: members that will have all their
steps done are gone and their places are free. Projection looks only at the first outstanding plan. So whatever a plan
promised, a request whose plan is over without having been run is seen again where it really stands.

Two kinds of plan. One *follows*: it starts once the running plan is done. One *joins*: it starts at the next step
boundary, because those that would run then are not those that should: someone is ready or gone, a place becomes free,
or a member would stand still because it was given fewer steps than the others. A member that the projection lets go
has then only the running step left, which it gets.

A plan that replaces a pending one may meet a worker that has just begun the replaced one. Indices are absolute, so
nothing is run twice; a joining plan gives twice the steps, so the worker is not left without work either.
"""

from common import messages as m
from services.scheduler.cost import steps_ahead
from services.scheduler.policy import Candidate, Groups, Policy
from services.scheduler.workers import SentPlan, Worker

MAX_OUTSTANDING = 16  # plans remembered; forgetting one only makes the belief about what runs less exact


class Planner:
    """Builds plans. It holds only what is the same for every worker."""

    def __init__(self, boot_id: str, policy: Policy, lease_steps: int) -> None:
        self._boot_id = boot_id
        self._policy = policy
        self._lease_steps = lease_steps  # steps that a plan gives
        self._last_step_id = 0  # over all workers, so that one that returns never sees an old id

    def next_plan(self, worker: Worker, now: float) -> m.StepPlan | None:
        """The plan that `worker` must be sent now, noted as sent, or None. Call it until it returns None."""
        current = worker.outstanding[0] if worker.outstanding else None
        pending = worker.outstanding[-1] if len(worker.outstanding) > 1 else None
        has_next = pending is not None and bool(pending.until)
        must_send = worker.has_news or worker.resend
        if has_next and not (must_send or worker.changed):
            return None
        worker.changed = False

        steps_left = _steps_left(worker, current) if current is not None else 0
        if current is not None and (has_next or steps_left > 1):
            # Will the right ones run after the next boundary, if nothing more is said?
            candidates, positions = _project(worker, current, joins=True)
            groups = self._groups(worker, candidates)
            after = (
                pending if pending is not None and (pending.starts == "next_boundary" or steps_left <= 1) else current
            )
            if must_send or (groups and groups != _with_steps_left(after, positions)):
                return self._send(worker, groups, positions, True, now)
            if has_next:
                return None
        candidates, positions = _project(worker, current, joins=False)
        groups = self._groups(worker, candidates)
        return self._send(worker, groups, positions, False, now) if groups or must_send else None

    def _groups(self, worker: Worker, candidates: list[Candidate]) -> Groups:
        if not worker.hello.step_execution and not all(candidate.ready for candidate in candidates):
            # Nobody joins a whole call once it has begun, and to be prepared for one takes no time: so it waits, and a
            # call's pictures are drawn together instead of the first one alone and then the rest.
            return ()
        return self._policy(candidates, worker.limits)

    def _send(self, worker: Worker, groups: Groups, positions: dict[str, int], joins: bool, now: float) -> m.StepPlan:
        self._last_step_id += 1
        step_id = self._last_step_id
        gain = 2 * self._lease_steps if joins else self._lease_steps
        until: dict[str, int] = {}
        message_groups = []
        for group in groups:
            members = []
            for request_id in group:
                request = worker.residents[request_id].request
                until_step = min(positions[request_id] + gain, request.total_steps)
                until[request_id] = until_step
                if until_step > request.planned_step:
                    request.planned_step = until_step
                members.append(m.PlannedRequest(request_id, request.attempt, until_step))
            message_groups.append(m.Group(tuple(members)))
        plan = m.StepPlan(
            scheduler_boot_id=self._boot_id,
            step_id=step_id,
            groups=tuple(message_groups),
            new=_new(worker, step_id),
            released=_released(worker, step_id),
            starts="next_boundary" if joins and groups else "after_current",
        )
        worker.has_news = worker.resend = False
        worker.newest_step_id = step_id
        worker.newest_sent_at = now
        if until or worker.outstanding:  # a worker that has nothing to run does not begin an empty plan
            worker.outstanding.append(SentPlan(step_id, groups, until, plan.starts))
            if len(worker.outstanding) > MAX_OUTSTANDING:
                del worker.outstanding[1]
        return plan


def settle(worker: Worker, step_id: int, plan_done: bool, last_step_id: int) -> None:
    """Takes plans out that are over, given a step boundary of the plan `step_id` at which the worker had received
    all plans up to `last_step_id`."""
    plans = worker.outstanding
    begun = step_id + 1 if plan_done else step_id  # plans with a smaller id are over
    for plan in reversed(plans):
        if plan.step_id <= last_step_id:
            # The newest plan received is the one that the worker holds next, whatever came between.
            if plan.step_id > step_id and (plan_done or plan.starts == "next_boundary"):
                begun = plan.step_id
            break
    _drop_older(worker, begun)


def settle_idle(worker: Worker, last_step_id: int) -> None:
    """Takes all plans out that an idle worker has received: there is nothing that it still runs."""
    _drop_older(worker, last_step_id + 1)


def _drop_older(worker: Worker, step_id: int) -> None:
    plans = worker.outstanding
    # The first that is left is begun; an empty one is over as soon as it is.
    while plans and (plans[0].step_id < step_id or not plans[0].until):
        del plans[0]


def _steps_left(worker: Worker, current: SentPlan) -> int:
    """Steps until `current` is done, the running one included."""
    longest = 0
    for request_id, until in current.until.items():
        left = until - worker.residents[request_id].request.step_index
        if left > longest:
            longest = left
    return longest


def _with_steps_left(plan: SentPlan, positions: dict[str, int]) -> Groups:
    """The groups of a plan, without members that can't go on under it from `positions`."""
    until = plan.until
    groups = (tuple(r for r in group if r in positions and until.get(r, 0) > positions[r]) for group in plan.groups)
    return tuple(group for group in groups if group)


def _project(worker: Worker, current: SentPlan | None, joins: bool) -> tuple[list[Candidate], dict[str, int]]:
    """The residents that have steps to do when the plan starts, in dispatch order, and the step each is then at."""
    candidates: list[Candidate] = []
    positions: dict[str, int] = {}
    running = current.until if current is not None else {}
    for request_id, residency in worker.residents.items():
        request = residency.request
        status = request.status
        if status == "decoding":
            continue
        position = request.step_index
        until = running.get(request_id)
        if until is not None and until > position:
            position = position + 1 if joins else until
        if status == "preparing":
            left = steps_ahead(request.request.params, worker.hello)
        else:
            left = request.total_steps - position
            if left <= 0:
                continue
        started = until is not None or status in ("running", "preempted")
        candidates.append(Candidate(request_id, residency.shape, left, status != "preparing", started))
        positions[request_id] = position
    return candidates, positions


def _new(worker: Worker, step_id: int) -> tuple[m.NewRequest, ...]:
    if not worker.unconfirmed_new:
        return ()
    for residency in worker.unconfirmed_new.values():
        residency.first_step_id = residency.first_step_id or step_id
    told = (residency.request for residency in worker.unconfirmed_new.values() if not residency.found)
    return tuple(m.NewRequest(request.request, request.attempt) for request in told)


def _released(worker: Worker, step_id: int) -> tuple[m.ReleasedRequest, ...]:
    if not worker.unconfirmed_releases:
        return ()
    for release in worker.unconfirmed_releases.values():
        release.first_step_id = release.first_step_id or step_id
    return tuple(release.message for release in worker.unconfirmed_releases.values())
