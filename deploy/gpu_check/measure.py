"""What a step costs, and whether a batch changes a result.

Role: times `StepRunner` on groups of requests and notes what memory they take; compares predictions and pictures of
requests that share a forward with those that they get alone. It knows no model's name and prints nothing.

How far apart two results in bfloat16 may be. A product of matrices is summed in another order for another number of
rows, so results are rounded differently in each layer. How much rounding there is was measured on a CPU, against the
same weights in float32, with random-weight models of the real depth (SDXL's UNet, 60 blocks of Qwen-Image) that were
narrower than the real ones: predictions were up to 2.2 % off, as a root mean square over root mean square, and pictures
by up to 1.6/255 on average. Two results that are so far off the truth are the square root of 2 times as far off each
other. The bounds are twice that. Guidance adds up two predictions, one weighted with its scale and the other with that
less one, and their errors with them.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from deploy.gpu_check.models import Size, Subject
from services.worker.input_batch import StepInputBatch, scatter_latents
from services.worker.runner import StepRunner
from services.worker.state import DiffusionRequestState
from services.worker.streams import release_cached_memory, synchronize

GUIDANCE = 2.0  # of the requests that are compared
BOUNDS = {torch.bfloat16: 0.06, torch.float16: 0.06 / 8, torch.float32: 1e-5}  # of an unguided prediction
PICTURE_BOUND = 5.0  # of 255, on average over a picture; two that have nothing to do with each other differ by 70
SEEN = 2.0  # times the bound: what a row with another's text or timestep must differ by at least
MAX_STEPS = 20  # of one measurement; the first one is not counted


class StepCost(Struct, frozen=True, kw_only=True):
    """A denoise step of a group of requests with guidance, all of one size, and the decode of one of its pictures."""

    height: int
    width: int
    requests: int
    rows: int
    step_ms: float | None = None  # from the states to the states; None: it did not fit
    images_s: float | None = (
        None  # if pictures were nothing but steps of this kind, as many as the model has by default
    )
    decode_ms: float | None = None
    peak_bytes: int | None = None  # of torch's, weights included; None on a CPU
    note: str = ""  # why there are no figures


class Equality(Struct, frozen=True, kw_only=True):
    """Requests of several texts, timesteps and guidance, and sizes if the model mixes them, together and alone."""

    requests: int
    rows: int
    sizes: list[Size]
    predictions: int  # compared, each request at each step
    bound: float  # of an unguided prediction
    # The worst of all predictions, each divided by what its guidance adds to the bound.
    worst_rms: float  # root mean square of the difference over that of the prediction
    worst_max: float  # largest difference over the largest value
    another_text: float  # what a row with the other's text differs by, as root mean square
    another_timestep: float
    picture_bound: float
    worst_picture_mean: float  # of 255: the mean difference of the picture that differs most
    worst_picture_max: int

    @property
    def least_seen(self) -> float:
        """What a mix-up of rows must change a prediction by, or this check would be of no use."""
        return SEEN * self.bound

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; nothing if all is well."""
        found = []
        if not self.worst_rms <= self.bound:  # written so that NaN counts
            found.append(
                f"a prediction differs by {self.worst_rms:.2%} from the same alone, more than {self.bound:.2%}"
            )
        if not self.worst_picture_mean <= self.picture_bound:
            found.append(
                f"a picture differs by {self.worst_picture_mean:.2f}/255 on average from the same alone, more than "
                f"{self.picture_bound:g}/255"
            )
        for what, moved in (("text", self.another_text), ("timestep", self.another_timestep)):
            if not moved >= self.least_seen:
                found.append(f"a row with another's {what} differs by {moved:.2%} only: a mix-up would not be seen")
        return found


def step_cost(subject: Subject, size: Size, requests: int, seconds: float) -> StepCost:
    """Times steps for about so long. A group that does not fit into the device's memory has a note and no figures."""
    device = subject.pipeline.device
    cost = StepCost(height=size[0], width=size[1], requests=requests, rows=2 * requests)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        step_s, decode_s = _step_and_decode(subject, size, requests, seconds)
    except torch.OutOfMemoryError:
        step_s = decode_s = 0.0
    if not step_s:  # only now: while the error was being handled, its traceback held the step's tensors
        release_cached_memory(device)
        return replace(cost, note="does not fit into the device's memory")
    return replace(
        cost,
        step_ms=1000 * step_s,
        images_s=requests / (subject.default_steps * step_s),
        decode_ms=1000 * decode_s,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _step_and_decode(subject: Subject, size: Size, requests: int, seconds: float) -> tuple[float, float]:
    """Seconds of a step, and of a picture's decode. Raises `OutOfMemoryError`."""
    runner = StepRunner(subject.pipeline)
    states = [subject.state(number, size, MAX_STEPS + 1, GUIDANCE) for number in range(requests)]
    for state in states:
        runner.add(state)
    first = _timed_steps(subject, runner, states, 1)
    step_s = _timed_steps(subject, runner, states, min(MAX_STEPS, max(2, int(seconds / first))))
    begun = time.perf_counter()
    subject.pipeline.post_decode(states[0])  # it ends with the picture on the CPU
    return step_s, time.perf_counter() - begun


def _timed_steps(subject: Subject, runner: StepRunner, states: Sequence[DiffusionRequestState], count: int) -> float:
    """Seconds of one of `count` steps that follow one another as they do in a worker. Raises `OutOfMemoryError`."""
    pipeline: Any = subject.pipeline
    denoise_step, forwards = pipeline.denoise_step, 0

    def counted(batch: StepInputBatch) -> Sequence[torch.Tensor]:
        nonlocal forwards
        forwards += 1
        predictions: Sequence[torch.Tensor] = denoise_step(batch)
        return predictions

    pipeline.denoise_step = counted
    try:
        synchronize(pipeline.device)
        begun = time.perf_counter()
        for _ in range(count):
            failed = runner.run_group(states).failed
            if forwards > count or failed:  # the runner halves a group that does not fit
                raise torch.OutOfMemoryError
        failed = runner.settle()
        synchronize(pipeline.device)
        seconds = (time.perf_counter() - begun) / count
    finally:
        pipeline.denoise_step = denoise_step
    if failed:
        raise ValueError(f"{subject.name}: {failed[0][1].message}")
    return seconds


def equality(subject: Subject, sizes: Sequence[Size], steps: int, dtype: torch.dtype) -> Equality:
    """Compares a request for each of `sizes`, every second of them guided, at each step and in its picture.

    A prediction is compared with the one that is made alone from the same latents: so a difference is that of one
    forward. The pictures are drawn from the noise on, together and alone.
    """
    guidances = [GUIDANCE if number % 2 else None for number in range(len(sizes))]

    def prepared() -> list[DiffusionRequestState]:
        return [
            subject.state(number, size, steps, guidance)
            for number, (size, guidance) in enumerate(zip(sizes, guidances, strict=True))
        ]

    together, distances = prepared(), []
    rows = sum(state.rows for state in together)
    for number, state in enumerate(together):  # they stand at different steps
        for _ in range(number % min(3, steps)):
            _advance(subject, [state], _predicted(subject, [state]))
    while running := [state for state in together if state.step_index < state.total_steps]:
        predictions = _predicted(subject, running)
        for state, prediction in zip(running, predictions, strict=True):
            added = 1.0 if state.uncond is None else math.hypot(state.guidance_scale, state.guidance_scale - 1)
            rms, most = _distance(prediction, _predicted(subject, [state])[0])
            distances.append((rms / added, most / added))
        _advance(subject, running, predictions)

    means, maxima = [], []
    for shared, alone in zip(together, prepared(), strict=True):
        while alone.step_index < alone.total_steps:
            _advance(subject, [alone], _predicted(subject, [alone]))
        difference = np.abs(_picture(subject, shared) - _picture(subject, alone))
        means.append(float(difference.mean()))
        maxima.append(int(difference.max()))
    another_text, another_timestep = _mixed_up(subject, sizes[0], steps)
    return Equality(
        requests=len(sizes),
        rows=rows,
        sizes=list(dict.fromkeys(sizes)),
        predictions=len(distances),
        bound=BOUNDS[dtype],
        worst_rms=max(rms for rms, _ in distances),
        worst_max=max(most for _, most in distances),
        another_text=another_text,
        another_timestep=another_timestep,
        picture_bound=PICTURE_BOUND,
        worst_picture_mean=max(means),
        worst_picture_max=max(maxima),
    )


def _mixed_up(subject: Subject, size: Size, steps: int) -> tuple[float, float]:
    """What the least change is that a mistake among the rows would make: the texts of two requests, then their
    timesteps, exchanged."""
    states = [subject.state(number, size, steps, None) for number in (0, len("other"))]
    _advance(subject, states[1:], _predicted(subject, states[1:]))
    right = _predicted(subject, states)
    texts, timesteps = StepInputBatch(states), StepInputBatch(states)
    for batch in (texts, timesteps):
        batch.gather()
    texts.prompt_embeds = texts.prompt_embeds.flip(0)
    texts.prompt_mask = None if texts.prompt_mask is None else texts.prompt_mask.flip(0)
    texts.pooled_embeds = None if texts.pooled_embeds is None else texts.pooled_embeds.flip(0)
    timesteps.timesteps = timesteps.timesteps.flip(0)
    least = []
    for batch in (texts, timesteps):
        wrong = subject.pipeline.denoise_step(batch)
        least.append(min(_distance(*pair)[0] for pair in zip(wrong, right, strict=True)))
    return least[0], least[1]


def _predicted(subject: Subject, states: Sequence[DiffusionRequestState]) -> Sequence[torch.Tensor]:
    batch = StepInputBatch(states)
    batch.gather()
    return subject.pipeline.denoise_step(batch)


def _advance(subject: Subject, states: Sequence[DiffusionRequestState], predictions: Sequence[torch.Tensor]) -> None:
    latents = []
    for new in subject.pipeline.step_scheduler(states, predictions):
        if isinstance(new, Exception):
            raise new
        latents.append(new)
    scatter_latents(states, latents)


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Of `one` from `other`: root mean square over root mean square, and largest difference over largest value."""
    one, other = one.float(), other.float()
    difference = one - other
    return float(difference.norm() / other.norm()), float(difference.abs().max() / other.abs().max())


def _picture(subject: Subject, state: DiffusionRequestState) -> np.ndarray:
    return np.asarray(subject.pipeline.post_decode(state), dtype=np.float32)
