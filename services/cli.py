"""The `stepweave` command: flags to frozen settings, then one service or a client.

Role: the door of every process. Services are imported inside their commands, so that a gateway never loads torch.
"""

import importlib.metadata
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from common.config import DATA_ADDRESS, HEARTBEAT_S, SCHEDULER_ADDRESS, GatewayConfig, SchedulerConfig, WorkerConfig
from common.errors import ConfigError
from common.process import run_service
from common.telemetry import LogFormat, LogLevel, configure_logging
from services.demo import DEMO_CHECKPOINT, DEMO_MODEL_NAME

app = typer.Typer(
    help="Stepweave serves diffusion models with continuous batching between denoise steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags on a narrow terminal
)

INTERRUPTED = 130  # exit code of a command that SIGINT or SIGTERM ended before it was through
WORKER_MODULES = ("accelerate", "diffusers", "numpy", "PIL", "torch", "transformers")

Host = Annotated[str, typer.Option(help="Address that the HTTP API listens on.")]
Port = Annotated[int, typer.Option(help="Port of the HTTP API.", min=1, max=65535)]
Model = Annotated[
    str | None,
    typer.Option(help="A diffusers folder or a hub id.", show_default="the demo checkpoint that comes with Stepweave"),
]
ServedModelName = Annotated[
    str | None, typer.Option(help="The name that requests use.", show_default="the last part of --model")
]
Device = Annotated[str, typer.Option(help='"cpu", "cuda", "cuda:1", …; "auto" takes a GPU if there is one.')]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Of weights and arithmetic; auto: float32 on a CPU, else bfloat16."),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests in one denoise step; 1 turns batching off.", min=1)]
MaxResidents = Annotated[
    int, typer.Option(help="Requests on a worker, in any phase.", min=0, show_default="twice --max-num-seqs")
]
MaxSteps = Annotated[int, typer.Option(help="The largest num_inference_steps that a request may ask for.", min=1)]
Threads = Annotated[int, typer.Option(help="Torch threads of a worker.", min=0, show_default="its share of the cores")]
StepExecution = Annotated[bool, typer.Option("--step-execution/--no-step-execution", help="Run step by step.")]
Policy = Annotated[Literal["fifo"], typer.Option(help="Who runs next.")]
MaxQueue = Annotated[int, typer.Option(help="Requests that may wait; more are refused at once.", min=1)]
SchedulerAddress = Annotated[str, typer.Option("--scheduler", help="Address of the scheduler.")]
Level = Annotated[LogLevel, typer.Option(help="Least important log lines that are shown.")]
Format = Annotated[LogFormat, typer.Option(help="Log lines for people or for programs.")]


def main() -> None:
    """Entry point of the `stepweave` command."""
    try:
        try:
            app()
        except ConfigError as error:
            _fail(str(error))
    except SystemExit as end:
        _end_process_if_threads_are_busy(end.code)
        raise


def _end_process_if_threads_are_busy(code: int | str | None) -> None:
    """Ends the process here and now if a worker's thread is still in a long step or encode.

    Interpreter shutdown would take such a daemon thread away in the midst of native code, which aborts the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _fail(message: str, exit_code: int = 1) -> NoReturn:
    print(f"stepweave: {message}", file=sys.stderr)  # noqa: T201 - the command line's own voice
    raise SystemExit(exit_code)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(importlib.metadata.version("stepweave"))


@app.command()
def serve(
    model: Model = None,
    served_model_name: ServedModelName = None,
    step_execution: StepExecution = True,
    max_num_seqs: MaxNumSeqs = 8,
    max_residents: MaxResidents = 0,
    max_num_inference_steps: MaxSteps = 200,
    workers: Annotated[int, typer.Option(help="Worker processes, each with its own copy of the model.", min=1)] = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    policy: Policy = "fifo",
    max_queue: MaxQueue = 1_000,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    log_level: Level = "info",
    log_format: Format = "auto",
) -> None:
    """Start gateway, scheduler and workers on this machine and say when they are ready."""
    from services.supervisor import ServeConfig, supervise

    configure_logging("supervisor", log_level, log_format)
    _check_worker(step_execution, max_num_seqs, max_residents)
    model, name = _model_and_name(model, served_model_name)
    config = ServeConfig(
        model=model,
        served_model_name=name,
        step_execution=step_execution,
        max_num_seqs=max_num_seqs,
        max_residents=max_residents,
        max_num_inference_steps=max_num_inference_steps,
        workers=workers,
        host=host,
        port=port,
        policy=policy,
        max_queue=max_queue,
        device=device,
        dtype=dtype,
        threads=threads,
        log_level=log_level,
        log_format=log_format,
    )
    run_service(supervise(config))


@app.command()
def gateway(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    scheduler: SchedulerAddress = SCHEDULER_ADDRESS,
    data_bind: Annotated[str, typer.Option(help="Address that workers bring pictures to.")] = DATA_ADDRESS,
    advertise: Annotated[str, typer.Option(help="That address as workers reach it.", show_default="--data-bind")] = "",
    request_timeout: Annotated[float, typer.Option(help="Seconds until an accepted request is given up.")] = 600.0,
    log_level: Level = "info",
    log_format: Format = "auto",
) -> None:
    """Start one gateway: the HTTP API."""
    from services.gateway.app import serve_gateway

    configure_logging("gateway", log_level, log_format)
    config = GatewayConfig(
        host=host,
        port=port,
        scheduler=scheduler,
        data_bind=data_bind,
        advertise=advertise,
        request_timeout_s=request_timeout,
    )
    run_service(serve_gateway(config))


@app.command()
def scheduler(
    bind: Annotated[str, typer.Option(help="Address that gateways and workers connect to.")] = SCHEDULER_ADDRESS,
    policy: Policy = "fifo",
    max_queue: MaxQueue = 1_000,
    suspect_after: Annotated[float, typer.Option(help="Seconds of silence until a worker gets nothing new.")] = 2.0,
    lost_after: Annotated[float, typer.Option(help="Seconds of silence until its work is done elsewhere.")] = 5.0,
    max_attempts: Annotated[int, typer.Option(help="Times that a request is given to a worker.", min=1)] = 3,
    log_level: Level = "info",
    log_format: Format = "auto",
) -> None:
    """Start the scheduler, which decides who runs next."""
    from services.scheduler.service import serve_scheduler

    if not HEARTBEAT_S < suspect_after <= lost_after:
        raise ConfigError(
            f"--suspect-after {suspect_after:g} must be more than a heartbeat ({HEARTBEAT_S:g} s) and no more than "
            f"--lost-after {lost_after:g}"
        )
    configure_logging("scheduler", log_level, log_format)
    config = SchedulerConfig(
        bind=bind,
        policy=policy,
        max_queue=max_queue,
        suspect_after_s=suspect_after,
        lost_after_s=lost_after,
        max_attempts=max_attempts,
    )
    run_service(serve_scheduler(config))


@app.command()
def worker(
    model: Model = None,
    served_model_name: ServedModelName = None,
    scheduler: SchedulerAddress = SCHEDULER_ADDRESS,
    name: Annotated[str, typer.Option(help="Name in logs and messages.")] = "worker",
    step_execution: StepExecution = True,
    max_num_seqs: MaxNumSeqs = 8,
    max_residents: MaxResidents = 0,
    max_num_inference_steps: MaxSteps = 200,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    log_level: Level = "info",
    log_format: Format = "auto",
) -> None:
    """Start one worker: a model on one device."""
    _check_worker(step_execution, max_num_seqs, max_residents)
    from services.worker import prepare_environment

    prepare_environment()  # before torch is imported, which reads it once
    from services.worker.service import serve_worker

    configure_logging("worker", log_level, log_format)
    model, name_for_requests = _model_and_name(model, served_model_name)
    config = WorkerConfig(
        model=model,
        served_model_name=name_for_requests,
        scheduler=scheduler,
        name=name,
        device=device,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_residents=max_residents,
        max_num_inference_steps=max_num_inference_steps,
        threads=threads,
        step_execution=step_execution,
    )
    run_service(serve_worker(config))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; its ending says the format.")],
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model.", show_default="the server's first")] = None,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels.")] = "auto",
    num_inference_steps: Annotated[
        int | None, typer.Option("--num-inference-steps", "--steps", help="Denoise steps.")
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(help="Tokens of the longest text encoder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same picture.", show_default="random")] = None,
    n: Annotated[int, typer.Option("-n", help="How many pictures; they are numbered in the file names.")] = 1,
    url: Annotated[str, typer.Option(help="Address of a running gateway.")] = "http://127.0.0.1:8000",
) -> None:
    """Ask a running server for pictures and write them to files."""
    from services.client import GenerateError, generate_to_files

    body = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "model": model,
        "size": size,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "max_sequence_length": max_sequence_length,
        "seed": seed,
        "n": n,
    }
    request = {field: value for field, value in body.items() if value is not None}
    try:
        interrupted = run_service(generate_to_files(url, request, output))
    except GenerateError as error:
        _fail(str(error))
    if interrupted:
        _fail("interrupted, nothing was written", INTERRUPTED)


def _check_worker(step_execution: bool, max_num_seqs: int, max_residents: int) -> None:
    """Raises `ConfigError` for what a worker can't run with, before anything is loaded or started."""
    missing = [name for name in WORKER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"a worker needs {', '.join(missing)}: pip install -c requirements.lock '.[worker]'")
    if not step_execution:
        raise ConfigError("--no-step-execution is not there yet: workers run step by step only")
    if 0 < max_residents < max_num_seqs:
        raise ConfigError(f"--max-residents {max_residents} is less than --max-num-seqs {max_num_seqs}")


def _model_and_name(model: str | None, served_model_name: str | None) -> tuple[str, str]:
    if model is None:
        return str(DEMO_CHECKPOINT), served_model_name or DEMO_MODEL_NAME
    return model, served_model_name or ""


if __name__ == "__main__":
    main()
