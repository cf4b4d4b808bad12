"""The core against everything that networks and machines do to its peers.

More of it: `STEPWEAVE_EXAMPLES=2000 pytest tests/scheduler/test_stateful.py` (any number; each adds about 15 ms).
"""

import os
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from common import messages as m
from services.scheduler.policy import Candidate, Groups, Policy
from tests.scheduler.model_worker import ModelWorker
from tests.scheduler.world import ModelGateway, World

DEFAULT_EXAMPLES = 300
EXAMPLES = int(os.environ.get("STEPWEAVE_EXAMPLES", str(DEFAULT_EXAMPLES)))

index = st.integers(min_value=0, max_value=7)
seeds = st.integers(0, 1 << 16)


class SchedulerMachine(RuleBasedStateMachine):
    """Peers act, messages travel or are lost, machines die; after every event the core's invariants hold."""

    lease_steps = 1
    policy: str | Policy = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            policy=self.policy,
            lease_steps=self.lease_steps,
            max_queue=6,
            suspect_after_s=2.0,
            lost_after_s=5.0,
            update_interval_s=0.0,
        )
        for _ in range(2):
            self.world.add_gateway()
            self.world.add_worker()
        self.world.deliver_all()

    def worker(self, number: int) -> ModelWorker:
        workers = list(self.world.workers.values())
        return workers[number % len(workers)]

    def gateway(self, number: int) -> ModelGateway:
        return list(self.world.gateways.values())[number % 2]

    def peer_id(self, number: int) -> str:
        ids = list(self.world.up)
        return ids[number % len(ids)]

    # Work

    @initialize(steps=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=seeds)
    def begin(self, steps: list[int], seed: int) -> None:
        for number, count in enumerate(steps):
            self.world.submit(self.gateway(number), 1, count, height=64 if seed % 3 else 128)
        self._muddle(seed, actions=50, losses=0.0)

    @rule(g=index, count=st.integers(1, 3), steps=st.integers(1, 5), height=st.sampled_from([64, 64, 128]))
    def submit(self, g: int, count: int, steps: int, height: int) -> None:
        self.world.submit(self.gateway(g), count, steps, height=height)

    @rule(g=index, which=st.integers(0, 30), foreign=st.booleans())
    def abort(self, g: int, which: int, foreign: bool) -> None:
        gateway = self.gateway(g)
        ids = [r for r, q in self.world.requests.items() if (q.home.gateway_id == gateway.gateway_id) != foreign]
        if ids:
            gateway.abort(ids[-1 - which % len(ids)])

    @rule(g=index)
    def submit_again(self, g: int) -> None:
        if not self.gateway(g).stopped:
            self.gateway(g).submit_again()

    # What goes on by itself

    @rule(seed=seeds, actions=st.integers(10, 100))
    def muddle(self, seed: int, actions: int) -> None:
        """Many small things happen in any order."""
        self._muddle(seed, actions, losses=0.0)

    @rule(seed=seeds, actions=st.integers(10, 100), losses=st.sampled_from([0.05, 0.3, 0.7]))
    def muddle_with_losses(self, seed: int, actions: int, losses: float) -> None:
        """The same, and some messages are lost."""
        self._muddle(seed, actions, losses)

    def _muddle(self, seed: int, actions: int, losses: float) -> None:
        draw = random.Random(seed)
        self.world.loses = lambda: draw.random() < losses
        for _ in range(actions):
            peer_id = draw.choice([p for p, messages in self.world.up.items() if messages or p in self.world.peers()])
            peer = self.world.peers().get(peer_id)
            match draw.randrange(8):
                case 0 | 1:
                    self.world.deliver_up(peer_id)
                case 2 | 3:
                    self.world.deliver_down(peer_id)
                case 4 if peer is not None and not peer.stopped:
                    peer.heartbeat()
                case 5:
                    self.world.advance(draw.choice([0.01, 0.1, 0.3]))
                case _ if isinstance(peer, ModelWorker) and not peer.stopped:
                    self._act(peer, draw)
        self.world.loses = lambda: False

    def _act(self, worker: ModelWorker, draw: random.Random) -> None:
        fails = draw.random() < 0.05
        if draw.random() < 0.3:
            worker.prepare(fails)
        elif draw.random() < 0.3:
            self.world.decode(worker)
        else:
            worker.end_step(next(iter(worker.in_step), None) if fails and worker.in_step else None)
            worker.begin_step()

    @rule(rounds=st.integers(1, 3))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    @rule(seconds=st.sampled_from([0.05, 0.6, 1.1, 2.1, 3.0, 6.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    # Trouble

    @rule(p=index, up=st.booleans(), seed=seeds, kind=st.sampled_from(["lose", "double", "shuffle"]))
    def reconnect(self, p: int, up: bool, seed: int, kind: str) -> None:
        """A connection breaks: what was under way is lost, doubled, or overtaken by what follows."""
        self.world.collect()
        channel = (self.world.up if up else self.world.down)[self.peer_id(p)]
        messages = list(channel)
        draw = random.Random(seed)
        if kind == "lose":
            messages = [x for x in messages if draw.random() < 0.5]
        elif kind == "double":
            messages += messages
        else:
            draw.shuffle(messages)
        channel.clear()
        channel.extend(messages)

    @precondition(lambda self: len(self.world.workers) < 3)
    @rule(late=st.booleans(), slow=st.booleans(), keeps=st.booleans(), forgetful=st.booleans())
    def spawn(self, late: bool, slow: bool, keeps: bool, forgetful: bool) -> None:
        self.world.add_worker(late_last_step_id=late, slow_start=slow, keeps_pending=keeps, forgetful=forgetful)

    @precondition(lambda self: len(self.world.workers) > 1)
    @rule(w=index)
    def kill(self, w: int) -> None:
        self.world.kill(self.worker(w).worker_id)

    @rule(p=index)
    def stop_or_continue(self, p: int) -> None:
        peer = self.world.peers().get(self.peer_id(p))
        if peer is not None:
            peer.stopped = not peer.stopped

    @precondition(lambda self: len(self.world.workers) > 1)
    @rule(w=index, leaving=st.booleans())
    def drain(self, w: int, leaving: bool) -> None:
        worker = self.worker(w)
        worker.draining = True
        worker.drain(leaving)
        if leaving:
            self.world.collect()
            self.world.kill(worker.worker_id)

    @rule()
    def crash_the_scheduler(self) -> None:
        self.world.restart_scheduler()

    @rule(
        seed=seeds,
        first=st.sampled_from(["workers", "gateways", "any"]),
        losses=st.sampled_from([0.0, 0.3]),
        doubled=st.booleans(),
    )
    def restart_the_scheduler_while_all_else_lives(self, seed: int, first: str, losses: float, doubled: bool) -> None:
        """Whoever speaks first, and whatever is lost or repeated: what runs goes on."""
        world = self.world
        known = world.known_to_run()
        world.restart_scheduler()
        draw = random.Random(seed)
        world.loses = lambda: draw.random() < losses
        peer_ids = [*world.workers, *world.gateways] if first == "workers" else [*world.gateways, *world.workers]
        if first == "any":
            draw.shuffle(peer_ids)
        for peer_id in peer_ids:
            peer = world.peers()[peer_id]
            if peer.stopped:
                continue
            peer.heartbeat()
            for number in range(20):
                if doubled and number < 4:
                    world.double(peer_id)
                if not (world.deliver_up(peer_id) or world.deliver_down(peer_id)):
                    break
            if isinstance(peer, ModelWorker):
                peer.end_step()
                peer.begin_step()
        world.loses = lambda: False
        for gateway in world.gateways.values():
            if not gateway.stopped:
                gateway.submit_again()
        for _ in range(4):
            world.round()
        world.check_goes_on(known)

    def teardown(self) -> None:
        self.world.settle()


def rotating(candidates: Sequence[Candidate], limits: m.WorkerLimits) -> Groups:
    """A policy that preempts as much as it can: whoever has most steps left runs, one a group, started or not."""
    ready = sorted((c for c in candidates if c.ready), key=lambda c: (-c.steps_left, c.started))
    return tuple((c.request_id,) for c in ready[: limits.max_num_seqs])


def _machine(lease_steps: int, policy: str | Policy = "fifo") -> Any:
    attributes = {"lease_steps": lease_steps, "policy": policy if isinstance(policy, str) else staticmethod(policy)}
    machine: Any = type("Machine", (SchedulerMachine,), attributes)
    machine.TestCase.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        derandomize=EXAMPLES == DEFAULT_EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


TestLeaseOfOneStep = _machine(1)
TestLeaseOfFourSteps = _machine(4)
TestPreemption = _machine(1, rotating)
TestPreemptionWithLeases = _machine(4, rotating)
