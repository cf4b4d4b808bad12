"""Which group runs next: the rules of `StepPlan` for one worker, without threads and without tensors.

Role: the plan that is running and the one that is pending, and what of them is left to do. Its owner asks at every
boundary. It knows requests by id, attempt and step only.
"""

import sys
from collections.abc import Callable

from common.messages import Group, PlannedRequest, StepPlan

# (request_id, attempt) → the steps behind it, or None if it is not on this worker.
Position = Callable[[str, int], int | None]


BEYOND = sys.maxsize  # the position of one that has no more steps, whatever a plan says


class PlanQueue:
    """The running plan and at most one pending. There is a pending one only while another is running or about to."""

    def __init__(self) -> None:
        self._current: StepPlan | None = None
        self._begun = False  # a step of the current plan was begun
        self._pending: StepPlan | None = None

    @property
    def idle(self) -> bool:
        """No plan is running and none is pending."""
        return self._current is None

    def offer(self, plan: StepPlan) -> None:
        """Takes a plan that is newer than all before it; one that is still pending is replaced.

        A first plan is never replaced before its first step: an idle worker is sent two at once, and the second counts
        on the first.
        """
        if self._current is None:
            self._current, self._begun = plan, False
        else:
            self._pending = plan

    def begin_step(self) -> StepPlan | None:
        """At a boundary: the plan to run a step of, or None. A pending plan that may start now has started."""
        if self._pending is not None and self._begun and self._pending.starts == "next_boundary":
            self._current, self._pending = self._pending, None
        self._begun = self._current is not None
        return self._current

    def end_plan(self) -> None:
        """The running plan is done; a pending one is next."""
        self._current, self._pending = self._pending, None
        self._begun = False


def runnable(group: Group, position: Position) -> list[PlannedRequest]:
    """The members that are here and short of their `until_step`."""
    return [member for member in group.requests if is_short(member, position)]


def is_short(member: PlannedRequest, position: Position) -> bool:
    step = position(member.request_id, member.attempt)
    return step is not None and step < member.until_step


def absent(plan: StepPlan, position: Position) -> tuple[str, ...]:
    """Members that are not on this worker, or no longer."""
    members = [member for group in plan.groups for member in group.requests]
    return tuple(m.request_id for m in members if position(m.request_id, m.attempt) is None)


def is_done(plan: StepPlan, position: Position) -> bool:
    """Every member is at its `until_step` or gone."""
    return not any(is_short(member, position) for group in plan.groups for member in group.requests)
