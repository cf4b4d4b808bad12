"""``python -m deploy.gpu_check``: step times, memory and equal results on this machine's GPU, in a few minutes.

Role: the command. No network and no checkpoint is needed: the models have random weights of real sizes.
"""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from msgspec.structs import replace
from rich.console import Console

from common.errors import ConfigError
from common.telemetry import configure_logging
from services.worker import prepare_environment

prepare_environment()

import diffusers  # noqa: E402 - after the environment that torch reads
import torch  # noqa: E402

from deploy.gpu_check.measure import StepCost, equality, step_cost  # noqa: E402
from deploy.gpu_check.models import MODELS, Size, Subject  # noqa: E402
from deploy.gpu_check.report import GB, ModelReport, Report, show, write  # noqa: E402
from services.worker.loader import resolve_device, resolve_dtype  # noqa: E402
from services.worker.streams import release_cached_memory, torch_thread  # noqa: E402
from services.worker.switches import Switches, compile_denoiser, refuse_unusable  # noqa: E402

FORWARDS = 4  # at least, of one measurement: the first, the timed ones, the decode


class Extent(NamedTuple):
    """How much is done."""

    sizes: tuple[Size, ...]
    requests: tuple[int, ...]
    equal_sizes: dict[str, tuple[Size, ...]]  # of the requests that are compared, by model
    equal_steps: int
    seconds: float  # of one measurement


REAL = Extent(
    sizes=((512, 512), (1024, 1024)),
    requests=(1, 2, 4, 8, 16),
    equal_sizes={
        "sdxl": ((512, 512),) * 5,
        "qwen-image": ((512, 512), (512, 640), (512, 512), (640, 512), (512, 512)),  # it mixes sizes
    },
    equal_steps=6,
    seconds=1.5,
)
TINY = Extent(
    sizes=((64, 64),),
    requests=(1, 2),
    equal_sizes={"sdxl": ((64, 64),) * 3, "qwen-image": ((64, 64), (64, 96), (96, 64))},
    equal_steps=4,
    seconds=0.05,
)


def main(
    models: Annotated[str, typer.Option(help="Which of them, with commas.")] = ",".join(MODELS),
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32; auto: bfloat16 on a GPU.")] = "auto",
    minutes: Annotated[float, typer.Option(help="What would take longer than that is left out.", min=0)] = 8.0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With regional compilation, which takes minutes.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny models and sizes: to try the check itself.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file too.", dir_okay=False)
    ] = None,
) -> None:
    """Times Stepweave's own steps of models of real size, and compares batched results with those of requests alone."""
    wanted = models.split(",")
    if unknown := [name for name in wanted if name not in MODELS]:
        raise typer.BadParameter(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    try:
        torch_device = resolve_device(device)
        torch_dtype = resolve_dtype(dtype, torch_device)
        refuse_unusable(Switches(compile=compiled), torch_device)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    configure_logging("gpu_check", "error")  # a size that does not fit is part of the check
    diffusers.utils.logging.set_verbosity_error()
    report = Report(
        device=torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else torch_device.type,
        device_bytes=torch.cuda.mem_get_info(torch_device)[1] if torch_device.type == "cuda" else None,
        dtype=str(torch_dtype).removeprefix("torch."),
        compiled=compiled,
        versions={"torch": str(torch.__version__), "diffusers": diffusers.__version__},
    )
    begun = time.monotonic()
    with torch_thread(torch_device, 0):
        for number, name in enumerate(wanted):
            share = (begun + 60 * minutes - time.monotonic()) / (len(wanted) - number)
            report.models.append(_checked(name, torch_device, torch_dtype, compiled, tiny, share))
    report.seconds = time.monotonic() - begun
    show(report, Console())
    if json_file is not None:
        write(report, json_file)
    raise typer.Exit(1 if report.faults else 0)


def _checked(
    name: str, device: torch.device, dtype: torch.dtype, compiled: bool, tiny: bool, seconds: float
) -> ModelReport:
    """One model, of which nothing stays. Its report has a note where it does not fit."""
    ends = time.monotonic() + seconds
    extent = TINY if tiny else REAL
    report = ModelReport(name=name)
    progress = Console(stderr=True)
    try:
        progress.print(f"{name}: making weights", highlight=False)
        subject = MODELS[name](device, dtype, tiny)
        if compiled:
            compile_denoiser(subject.pipeline._pipe)  # type: ignore[attr-defined]
        report.parameters, report.default_steps = subject.parameters, subject.default_steps
        progress.print(f"{name}: comparing batched and alone", highlight=False)
        report.equality = equality(subject, extent.equal_sizes[name], extent.equal_steps, dtype)
        report.steps = [cost for size in extent.sizes for cost in _costs(subject, size, extent, ends, progress)]
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] / GB
        report.note = f"not checked, it does not fit into the device's memory, of which {free:.0f} GB are free now"
    subject = None  # type: ignore[assignment]
    gc.collect()  # parts of a pipeline refer to each other
    release_cached_memory(device)
    return report


def _costs(subject: Subject, size: Size, extent: Extent, ends: float, progress: Console) -> Iterator[StepCost]:
    """A step of each number of requests, the smallest first. What is left out says why."""
    last: StepCost | None = None
    for requests in extent.requests:
        height, width = size
        progress.print(f"{subject.name}: {width}x{height}, {requests} requests", highlight=False)
        left_out = StepCost(height=height, width=width, requests=requests, rows=2 * requests)
        if last is not None and last.note:
            yield replace(left_out, note=last.note)
            continue
        last_ms = 0.0 if last is None or last.step_ms is None else last.step_ms * requests / last.requests
        if time.monotonic() + FORWARDS * last_ms / 1000 > ends:
            last = replace(left_out, note="left out: it would take longer than --minutes allows")
        else:
            last = step_cost(subject, size, requests, extent.seconds)
        yield last


if __name__ == "__main__":
    typer.run(main)
