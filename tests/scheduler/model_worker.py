"""A model of a worker: all that `common.messages` asks of one, without a tensor, a thread or a socket.

Role: the peer that the core is tested against. What must hold on a worker at every moment is asserted here.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from common import messages as m
from common.errors import ErrorInfo
from common.params import DiffusionRequest
from tests import builders


@dataclass
class Held:
    """One resident of a model worker."""

    request: DiffusionRequest
    attempt: int
    phase: Literal["preparing", "denoising", "decoding"] = "preparing"
    step_index: int = 0
    released: bool = False  # leaves at the next boundary

    @property
    def total_steps(self) -> int:
        return self.request.params.num_inference_steps


@dataclass
class ModelWorker:
    """A worker by the contract: a mailbox with one plan running and one pending, and residents with phases."""

    worker_id: str
    max_num_seqs: int = 2
    max_residents: int = 4
    # Whether its results say which plans it had received when they are sent, not at the boundary that they report.
    late_last_step_id: bool = False
    # Whether an idle worker leaves a new plan in the mailbox for a moment, where a newer one may replace it.
    slow_start: bool = False
    # Whether a plan without groups leaves a pending one in place.
    keeps_pending: bool = False
    # Whether it forgets an attempt that it is through with, so that a plan which still repeats it brings it back.
    forgetful: bool = False
    boot_id: str = ""
    past_boot_ids: list[str] = field(default_factory=list)
    last_step_id: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # newest attempt of each request that it ever held
    current: m.StepPlan | None = None
    pending: m.StepPlan | None = None
    in_step: dict[str, int] | None = None  # members of the step that is running, with their attempts
    stopped: bool = False  # SIGSTOP
    draining: bool = False
    was_lost: bool = False  # the scheduler has forgotten it at least once
    out: list[Any] = field(default_factory=list)

    def hello(self) -> None:
        self.out.append(
            builders.worker_hello(
                self.worker_id,
                scheduler_boot_id=self.boot_id,
                max_num_seqs=self.max_num_seqs,
                max_residents=self.max_residents,
                residents=self.residents(),
                last_step_id=self.last_step_id,
            )
        )
        if self.draining:
            self.drain(leaving=False)

    def residents(self) -> tuple[m.Resident, ...]:
        return tuple(
            m.Resident(i, h.attempt, h.phase, h.step_index, 0 if h.phase == "preparing" else h.total_steps)
            for i, h in self.held.items()
        )

    def heartbeat(self) -> None:
        idle = self.current is None and self.pending is None
        self.out.append(
            m.WorkerHeartbeat(self.worker_id, self.boot_id, self.last_step_id, idle, residents=self.residents())
        )

    def drain(self, leaving: bool) -> None:
        self.out.append(m.WorkerDraining(self.worker_id, self.boot_id, leaving, "asked to"))

    def receive(self, message: Any) -> None:
        if isinstance(message, m.Welcome):
            if message.scheduler_boot_id in self.past_boot_ids:
                return
            if message.scheduler_boot_id != self.boot_id:
                self.past_boot_ids.append(self.boot_id)
                self.boot_id, self.last_step_id = message.scheduler_boot_id, 0
            else:
                self.was_lost = True
            self.hello()
        elif isinstance(message, m.StepPlan):
            if message.scheduler_boot_id == self.boot_id and message.step_id > self.last_step_id:
                self._take(message)
        else:
            raise AssertionError(f"unexpected: {message}")

    def _take(self, plan: m.StepPlan) -> None:
        self.last_step_id = plan.step_id
        for released in plan.released:
            held = self.held.get(released.request_id)
            if held is not None and held.attempt == released.attempt:
                if self.in_step is not None and self.in_step.get(released.request_id) == held.attempt:
                    held.released = True
                else:
                    del self.held[released.request_id]
        for new in plan.new:
            request_id = new.request.request_id
            if new.attempt > self.seen.get(request_id, 0) or (self.forgetful and request_id not in self.held):
                self.held[request_id] = Held(new.request, new.attempt)
                self.seen[request_id] = new.attempt
        # After it was given up, plans from before may still reach it; what they bring is released again.
        if not (self.forgetful or self.was_lost):
            present = sum(not held.released for held in self.held.values())
            assert present <= self.max_residents, f"{self.worker_id} is to hold {present}"
        if plan.groups or not self.keeps_pending:
            self.pending = plan if plan.groups else None
        if not self.slow_start:
            self.wake()

    def wake(self) -> None:
        """An idle step thread looks into the mailbox."""
        if self.current is None and self.pending is not None:
            self.current, self.pending = self.pending, None

    def begin_step(self) -> bool:
        """Starts a step of the current plan. False if there is none or one is running."""
        self.wake()
        if self.current is None or self.in_step is not None:
            return False
        members = []
        for group in self.current.groups:
            runnable = [p.request_id for p in group.requests if self._short(p)]
            shapes = {
                (self.held[r].request.params.height, self.held[r].request.params.guidance_scale) for r in runnable
            }
            assert len(shapes) <= 1, f"{self.worker_id} runs {shapes} together"
            members += runnable
        assert len(members) <= self.max_num_seqs, f"{self.worker_id} runs {len(members)}"
        self.in_step = {r: self.held[r].attempt for r in members}
        return True

    def _short(self, planned: m.PlannedRequest) -> bool:
        held = self.held.get(planned.request_id)
        if held is None or held.attempt != planned.attempt or held.released or held.phase != "denoising":
            return False
        return held.step_index < planned.until_step

    def end_step(self, failing: str | None = None) -> bool:
        """Ends the running step: a boundary. False if none is running."""
        if self.in_step is None:
            return False
        assert self.current is not None
        until = {p.request_id: p for group in self.current.groups for p in group.requests}
        progress, failed = [], []
        for request_id, attempt in self.in_step.items():
            held = self.held.get(request_id)
            if held is None or held.attempt != attempt:  # a newer attempt has taken its place meanwhile
                continue
            if request_id == failing:
                failed.append(m.Failure(request_id, held.attempt, ErrorInfo("non_finite", "NaN")))
                del self.held[request_id]
                continue
            held.step_index += 1
            assert held.step_index <= min(until[request_id].until_step, held.total_steps)
            progress.append(m.Progress(request_id, held.attempt, held.step_index))
            if held.step_index == held.total_steps:
                held.phase = "decoding"
        self.in_step = None
        for request_id in [r for r, held in self.held.items() if held.released]:
            del self.held[request_id]
        skipped = tuple(r for r, p in until.items() if r not in self.held or self.held[r].attempt != p.attempt)
        done = not any(self._short(p) for p in until.values())
        plan, received = self.current, self.last_step_id
        if self.pending is not None and (done or self.pending.starts == "next_boundary"):
            self.current, self.pending = self.pending, None
        elif done:
            self.current = None
        if plan.scheduler_boot_id != self.boot_id:  # it says nothing to the present scheduler
            self.out += [m.RequestDone(self.worker_id, f.request_id, f.attempt, "error", f.error) for f in failed]
            self.heartbeat()
            return True
        result = m.StepResult(
            self.worker_id,
            self.boot_id,
            plan.step_id,
            progress=tuple(progress),
            failed=tuple(failed),
            skipped=skipped,
            plan_done=done,
            last_step_id=received,
        )
        self.out.append(result)
        return True

    def flush(self) -> list[Any]:
        """What it sends now."""
        messages, self.out = self.out, []
        if self.late_last_step_id:
            messages = [
                m.StepResult(**{f: getattr(x, f) for f in x.__struct_fields__} | {"last_step_id": self.last_step_id})
                if isinstance(x, m.StepResult) and x.scheduler_boot_id == self.boot_id
                else x
                for x in messages
            ]
        return messages

    def prepare(self, fails: bool = False) -> bool:
        """Prepares the next preparing resident."""
        request_id = next((r for r, held in self.held.items() if held.phase == "preparing"), None)
        if request_id is None:
            return False
        held = self.held[request_id]
        if fails:
            self._done(request_id, "error", ErrorInfo("generation_failed", "no"))
            return True
        held.phase = "denoising"
        self.out.append(
            m.RequestReady(
                self.worker_id, request_id, held.attempt, 0, held.total_steps, last_step_id=self.last_step_id
            )
        )
        return True

    def decode(self) -> str | None:
        """Decodes the next finished resident and delivers its picture; returns its id."""
        request_id = next((r for r, held in self.held.items() if held.phase == "decoding" and not held.released), None)
        if request_id is not None:
            self._done(request_id, "completed", None)
        return request_id

    def _done(self, request_id: str, outcome: Literal["completed", "error"], error: ErrorInfo | None) -> None:
        held = self.held.pop(request_id)
        self.out.append(m.RequestDone(self.worker_id, request_id, held.attempt, outcome, error))
