"""A worker by the contract of `StepPlan` whose steps take no time, for measuring the scheduler alone.

Role: plans in, results out, by the worker's own rules (`services.worker.plans`). No socket, thread, clock or tensor.
"""

from common import messages as m
from common.params import DataHome, DiffusionRequest, SamplingParams
from services.worker import plans

MODEL = "virtual"
GATEWAY_ID = "gateway-bench"
REQUESTS = 8  # that a worker runs and holds
STEPS = 100_000_000  # of a request: none ends while it is measured

PROFILE = m.ModelProfile(
    model=MODEL,
    pipeline="none",
    size=m.SizeRule(multiple=8, min_side=16, max_side=1024, max_pixels=1024 * 1024, pixels_per_token=8),
    default_height=64,
    default_width=64,
    default_num_inference_steps=STEPS,
    default_guidance_scale=4.0,
    max_num_inference_steps=STEPS,
)


class VirtualWorker:
    """One worker and what it holds."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._epoch = ""
        self._plans = plans.PlanQueue()
        self._last_step_id = 0
        self._steps: dict[tuple[str, int], int] = {}  # by request and attempt

    def hello(self, epoch: str) -> m.WorkerHello:
        self._epoch = epoch
        return m.WorkerHello(
            worker_id=self.worker_id,
            protocol_version=m.PROTOCOL_VERSION,
            scheduler_boot_id=epoch,
            profile=PROFILE,
            cost=m.StepCost(floor_s=0.02, per_token_s=1e-4),
            limits=m.WorkerLimits(max_num_seqs=REQUESTS, max_residents=REQUESTS),
        )

    def on_plan(self, plan: m.StepPlan) -> list[m.RequestReady]:
        """Takes a plan; what it brings anew is prepared at once."""
        if plan.step_id <= self._last_step_id:
            return []
        self._last_step_id = plan.step_id
        ready = []
        for new in plan.new:
            key = (new.request.request_id, new.attempt)
            if key not in self._steps:
                self._steps[key] = 0
                ready.append(m.RequestReady(self.worker_id, *key, 0, STEPS, last_step_id=plan.step_id))
        self._plans.offer(plan)
        return ready

    def step(self) -> m.StepResult | None:
        """Runs one step. None: there is no plan."""
        plan = self._plans.begin_step()
        if plan is None:
            return None
        progress = []
        for group in plan.groups:
            for member in plans.runnable(group, self._position):
                key = (member.request_id, member.attempt)
                self._steps[key] += 1
                progress.append(m.Progress(*key, self._steps[key]))
        done = plans.is_done(plan, self._position)
        if done:
            self._plans.end_plan()
        return m.StepResult(
            worker_id=self.worker_id,
            scheduler_boot_id=self._epoch,
            step_id=plan.step_id,
            progress=tuple(progress),
            plan_done=done,
            last_step_id=self._last_step_id,
            timings=(m.GroupTiming(len(progress), 2 * len(progress), 128 * len(progress), 0.02),),
        )

    def _position(self, request_id: str, attempt: int) -> int | None:
        return self._steps.get((request_id, attempt))


def submission(number: int) -> m.SubmitRequests:
    """As many requests as one worker holds."""
    params = SamplingParams(
        prompt="red apple", height=64, width=64, num_inference_steps=STEPS, guidance_scale=4.0, seed=0
    )
    home = DataHome(GATEWAY_ID, "tcp://127.0.0.1:1")
    requests = (DiffusionRequest(f"r{number}-{index}", MODEL, params, home) for index in range(REQUESTS))
    return m.SubmitRequests(GATEWAY_ID, tuple(requests))
