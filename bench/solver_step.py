"""``python -m bench.solver_step``: what it gains to compute the solver steps of several requests as one."""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from msgspec import Struct
from rich.table import Table

from bench.options import JsonFile, numbers, positive
from bench.report import Spread, show, spread, write_json
from common.errors import StepweaveError
from common.params import DataHome, DiffusionRequest, SamplingParams
from services.demo.training.progress import steps as progress
from services.worker import prepare_environment

STEPS = 50  # of each measurement; the requests have as many
SOLVERS = ("FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler", "DDIMScheduler")


class SolverStep(Struct, frozen=True, kw_only=True):
    """What a step of one kind of solver costs a group. Seconds."""

    solver: str
    requests: int
    alone: Spread  # each request's own solver, one after another
    together: Spread  # as a worker does
    gain: Spread  # how many times faster, of each pair


def main(
    latents: Annotated[str, typer.Option(help="Of one request: CHANNELSxHEIGHTxWIDTH.")] = "8x16x16",
    requests: Annotated[str, typer.Option(help="Sizes of the group.")] = "2,4,8,16",
    rounds: Annotated[int, typer.Option(help="Measurements of each.", min=1)] = 7,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads.", min=1)] = len(os.sched_getaffinity(0)),
    json_file: JsonFile = None,
) -> None:
    """Time the solver steps alone, without any model: each request's own, and those of a group computed as one."""
    sizes = list(numbers(requests, positive, "--requests").values)
    shape = tuple(int(side) for side in latents.split("x") if side.isdecimal())
    if len(shape) != 3 or 0 in shape:
        raise typer.BadParameter("--latents are CHANNELSxHEIGHTxWIDTH, such as 8x16x16")
    prepare_environment()  # before torch is imported, which reads it once
    import torch

    torch.set_num_threads(threads)
    try:
        measured = measure(shape, sizes, rounds, device, dtype)
    except StepweaveError as error:  # the device or the dtype
        raise typer.BadParameter(str(error)) from None
    table = Table("solver", "n", "each alone, µs", "together, µs", "times faster", title=f"latents {latents}")
    for row in measured:
        times = (row.alone.shown(0, 1e6), row.together.shown(0, 1e6), row.gain.shown(2))
        table.add_row(row.solver.removesuffix("Scheduler"), str(row.requests), *times)
    show(table)
    write_json(json_file, measured)


def measure(shape: tuple[int, ...], sizes: list[int], rounds: int, device: str, dtype: str) -> list[SolverStep]:
    """Each solver with each size of a group, by turns alone and together."""
    import torch

    from services.worker.loader import resolve_device, resolve_dtype
    from services.worker.pipelines.solvers import solve, solve_one
    from services.worker.streams import synchronize

    on = resolve_device(device)
    of = resolve_dtype(dtype, on)

    def seconds(name: str, requests: int, step: Callable[..., Any]) -> float:
        """Of one step of the group."""
        states = [_state(name, shape, number, on, of) for number in range(requests)]
        noise_preds = torch.randn((requests, *shape), device=on, dtype=of).split(1)
        elapsed = 0.0
        for _ in range(STEPS):
            for state in states:
                state.model_input()
            synchronize(on)
            begun = time.perf_counter()
            stepped = step(states, noise_preds)
            synchronize(on)
            elapsed += time.perf_counter() - begun
            for state, new in zip(states, stepped, strict=True):
                state.latents = new
                state.step_index += 1
        return elapsed / STEPS

    def each_alone(states: Any, noise_preds: Any) -> list[Any]:
        return [solve_one(state, noise_pred) for state, noise_pred in zip(states, noise_preds, strict=True)]

    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {(n, size): [] for n in SOLVERS for size in sizes}
    with torch.inference_mode():
        for name, size in pairs:
            seconds(name, size, each_alone)  # pays for one-off work
            seconds(name, size, solve)
        for _ in progress("stepping", 0, rounds):
            for name, size in pairs:
                pairs[name, size].append((seconds(name, size, each_alone), seconds(name, size, solve)))
    return [
        SolverStep(
            solver=name,
            requests=size,
            alone=spread([alone for alone, _ in values]),
            together=spread([together for _, together in values]),
            gain=spread([alone / together for alone, together in values]),
        )
        for (name, size), values in pairs.items()
    ]


def _state(name: str, shape: tuple[int, ...], seed: int, device: Any, dtype: Any) -> Any:
    """A `DiffusionRequestState` that is all solver."""
    import diffusers
    import torch

    from services.worker.pipelines.solvers import set_timesteps, step_arguments, with_own_scheduler
    from services.worker.state import Conditioning, DiffusionRequestState

    params = SamplingParams(prompt="", height=0, width=0, num_inference_steps=STEPS, guidance_scale=1.0, seed=seed)
    scheduler = with_own_scheduler(SimpleNamespace(scheduler=getattr(diffusers, name)()), params).scheduler
    timesteps = set_timesteps(scheduler, params, device)
    generator = torch.Generator("cpu").manual_seed(seed)
    return DiffusionRequestState(
        request=DiffusionRequest(request_id=str(seed), model="", params=params, home=DataHome("", "")),
        cond=Conditioning(torch.empty((1, 0, 0))),
        uncond=None,
        guidance_scale=1.0,
        latents=torch.randn((1, *shape), generator=generator).to(device, dtype),
        timesteps=timesteps,
        scheduler=scheduler,
        generator=generator,
        image_tokens=1,
        extra_step_kwargs=step_arguments(scheduler, generator),
        scales_model_input=hasattr(scheduler, "scale_model_input"),
    )


if __name__ == "__main__":
    typer.run(main)
