"""The `stepweave` command: settings to frozen records, then one service or a client.

Role: the door of every process. Services are imported inside their commands, so that a gateway never loads torch.
"""

import importlib.metadata
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer

from common.config import ServeConfig, WorkerConfig
from common.errors import ConfigError
from common.process import run_service
from common.telemetry import configure_logging
from services.flags import takes_settings
from services.settings import COMMANDS, DEFAULT_FILE, Settings, read_file, resolve

app = typer.Typer(
    help="Stepweave serves diffusion models with continuous batching between denoise steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags on a narrow terminal
)

log = structlog.get_logger()

INTERRUPTED = 130  # exit code of a command that SIGINT or SIGTERM ended before it was through
WORKER_MODULES = ("accelerate", "av", "diffusers", "numpy", "PIL", "torch", "transformers")

File = Annotated[
    Path | None,
    typer.Option("--config", help="A settings file.", show_default=f"{DEFAULT_FILE}, if it is there", metavar="FILE"),
]
AsFile = Annotated[bool, typer.Option("--toml", help="Print a settings file to start from.")]


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
@takes_settings("serve")
def serve(file: File = None, **flags: Any) -> None:
    """Start gateway, scheduler and workers on this machine and say when they are ready."""
    from services.supervisor import supervise

    config = _in_force("serve", file, flags)
    _check_worker(config)
    run_service(supervise(config))


@app.command()
@takes_settings("gateway")
def gateway(file: File = None, **flags: Any) -> None:
    """Start one gateway: the HTTP API."""
    from services.gateway.app import serve_gateway

    run_service(serve_gateway(_in_force("gateway", file, flags)))


@app.command()
@takes_settings("scheduler")
def scheduler(file: File = None, **flags: Any) -> None:
    """Start the scheduler, which decides who runs next."""
    from services.scheduler.service import serve_scheduler

    run_service(serve_scheduler(_in_force("scheduler", file, flags)))


@app.command()
@takes_settings("worker")
def worker(file: File = None, **flags: Any) -> None:
    """Start one worker: a model on one device."""
    config = _in_force("worker", file, flags)
    _check_worker(config)
    from services.worker import prepare_environment

    prepare_environment()  # before torch is imported, which reads it once
    from services.worker.service import serve_worker

    run_service(serve_worker(config))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; its ending says the format.")],
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model.", show_default="the server's first")] = None,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT in pixels.")] = "auto",
    num_frames: Annotated[int | None, typer.Option(help="More than one make a video, an .mp4 file.")] = None,
    num_inference_steps: Annotated[
        int | None, typer.Option("--num-inference-steps", "--steps", help="Denoise steps.")
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    true_cfg_scale: Annotated[
        float | None, typer.Option(help="The same, of the models that have it (Qwen-Image, FLUX.1).")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Solver: a scheduler class of diffusers.")] = None,
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
        "num_frames": num_frames,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "true_cfg_scale": true_cfg_scale,
        "scheduler": scheduler,
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


config_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


@config_app.callback()
def show_all_settings(context: typer.Context, toml: AsFile = False, file: File = None) -> None:
    """Check the settings, print what is in force and whence it is."""
    if context.invoked_subcommand is None:
        _show([_resolved(command, file, {}) for command in COMMANDS], toml)


def _add_show_command(command: str) -> None:
    @config_app.command(command, help=f"Print what `{command}` would run with, given these flags.")
    @takes_settings(command)
    def show(context: typer.Context, toml: AsFile = False, file: File = None, **flags: Any) -> None:
        assert context.parent is not None
        before = context.parent.params  # `stepweave config --toml serve` is as good as `stepweave config serve --toml`
        _show([_resolved(command, file or before["file"], flags)], toml or before["toml"])


for _command in COMMANDS:
    _add_show_command(_command)


def _show(commands: list[Settings], toml: bool) -> None:
    from rich.console import Console

    from services.settings_view import as_file, print_settings

    if toml:
        typer.echo(as_file(commands), nl=False)
    else:
        print_settings(commands, Console())


def _resolved(command: str, file: Path | None, flags: dict[str, Any]) -> Settings:
    given = {key: value for key, value in flags.items() if value is not None}
    return resolve(command, given, os.environ, read_file(file, os.environ))


def _in_force(command: str, file: Path | None, flags: dict[str, Any]) -> Any:
    """The record that `command` runs with. From here on there are log lines."""
    settings = _resolved(command, file, flags)
    service = "supervisor" if command == "serve" else command
    configure_logging(service, settings.config.log_level, settings.config.log_format)
    if settings.unread:
        log.info("there are settings for other commands, which this one does not read", names=settings.unread)
    return settings.config


def _check_worker(config: ServeConfig | WorkerConfig) -> None:
    """Raises `ConfigError` for what a worker can't run with, before anything is loaded or started."""
    missing = [name for name in WORKER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"a worker needs {', '.join(missing)}: pip install -c requirements.lock '.[worker]'")


if __name__ == "__main__":
    main()
