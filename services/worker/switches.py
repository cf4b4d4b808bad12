"""diffusers' own switches for memory and speed: VAE tiling and slicing, offload, compile.

Role: turns them on for a pipeline that has just been loaded, or says why they can't be. What they do is diffusers' and
accelerate's code, but for `_Turns`: two threads use a model that is run step by step, and neither may move a component
that the other is using. It knows no requests and no families.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from common.config import OffloadName
from common.errors import ConfigError

DENOISERS = ("unet", "transformer", "transformer_2")  # diffusers' names for what runs at every step
VAE = "vae"
CPU = torch.device("cpu")

# Of a block's code: each width, one row or several, with and without a mask are graphs of their own. Torch keeps eight,
# beyond which a block runs as it is.
COMPILED_GRAPHS = 32


@dataclass(frozen=True, slots=True)
class Switches:
    """Which are on. The fields are those of `WorkerConfig`."""

    vae_tiling: bool = False
    vae_slicing: bool = False
    offload: OffloadName = "none"
    compile: bool = False


def refuse_unusable(switches: Switches, device: torch.device) -> None:
    """Raises `ConfigError` for what can't be on this device, whatever the model is. Asked before one is loaded."""
    if switches.offload != "none" and device.type == "cpu":
        raise ConfigError(
            f"--offload {switches.offload} keeps weights in the CPU's memory until a GPU needs them; on the device "
            "cpu there is nothing to offload from: leave it out, or choose another --device"
        )
    if switches.compile:
        _require_compiler(device)


def place(pipe: Any, device: torch.device, switches: Switches, step_execution: bool) -> None:
    """Puts a pipeline, which is on the CPU, where it is to run, and turns the switches on.

    Raises `ConfigError` if the model has no such switch. `step_execution` says that the pipeline's denoiser and its
    other components will be used by two threads at once.
    """
    if switches.offload == "none":
        pipe.to(device)
    elif switches.offload == "group":
        offload_groups(pipe, device)
    elif step_execution:
        take_turns(pipe, device)
    else:
        _offload_components(pipe, device)
    if switches.vae_tiling:
        _switch_vae(pipe, "enable_tiling", "--vae-tiling")
    if switches.vae_slicing:
        _switch_vae(pipe, "enable_slicing", "--vae-slicing")
    if switches.compile:
        compile_denoiser(pipe)


def _switch_vae(pipe: Any, method: str, flag: str) -> None:
    vae = getattr(pipe, VAE, None)
    if vae is None:
        raise ConfigError(f"{flag} can't be used: a {type(pipe).__name__} has no VAE")
    try:
        getattr(vae, method)()
    except (AttributeError, NotImplementedError):
        raise ConfigError(f"{flag} can't be used: this model's VAE, a {type(vae).__name__}, can't do it") from None


def _offload_components(pipe: Any, device: torch.device) -> None:
    """diffusers' model offload: each component is on the device from its first use until the next one's."""
    try:
        pipe.enable_model_cpu_offload(device=device)
    except ValueError as error:
        raise ConfigError(f"--offload model can't be used with a {type(pipe).__name__}: {error}") from error


def offload_groups(pipe: Any, device: torch.device) -> None:
    """diffusers' group offload: each layer of the denoiser and of the text encoders is on the device while it runs.

    On CUDA the next layer is fetched meanwhile, on a stream of the component's own. A component is used by one thread,
    so two never fetch the same layer. The VAE, the smallest part, stays on the device: it is entered by `decode`, where
    diffusers' prefetching can't see the order of its layers.
    """
    streams = device.type == "cuda"
    try:
        pipe.enable_group_offload(
            onload_device=device,
            offload_device=CPU,
            offload_type="leaf_level",  # blocks would leave out components that have no list of them
            use_stream=streams,
            record_stream=streams,  # else the CPU would wait for the device after each layer
            exclude_modules=[VAE],
        )
    except ValueError as error:
        raise ConfigError(f"--offload group can't be used with a {type(pipe).__name__}: {error}") from error


def take_turns(pipe: Any, device: torch.device) -> None:
    """Model offload for a pipeline that is run step by step: the denoiser stays on the device, and of the other
    components only the one that was used last is there.

    diffusers' own would move the denoiser out whenever a prompt is encoded or a picture decoded, which happens beside
    the denoise loop, in the middle of its steps.
    """
    turns = _Turns(device)
    for name, part in pipe.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        if name in DENOISERS:
            part.to(device)
        else:
            add_hook_to_module(part, turns)


class _Turns(ModelHook):  # type: ignore[misc]
    """Modules of which at most one is on the device. Their thread is one and the same."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device  # where diffusers looks for the device of an offloaded pipeline
        self._there: torch.nn.Module | None = None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called before a module's forward, and before `encode` and `decode` of a VAE."""
        if self._there is not module:
            # The memory that gets free stays torch's: the next of them is put there, and the denoise stream is given it
            # if it finds no other.
            leaving, self._there = self._there, None
            if leaving is not None:
                leaving.to(CPU)
            try:
                module.to(self.execution_device)
            except Exception:  # no room for all of it: whoever comes next must not find a part of it there
                module.to(CPU)
                raise
            self._there = module
        return args, kwargs


def _require_compiler(device: torch.device) -> None:
    """Compiles next to nothing. Raises `ConfigError` if that fails."""

    def next_to_nothing(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    try:
        torch.compile(next_to_nothing)(torch.zeros(2, device=device))
    except Exception as error:  # torch's compiler and what it starts raise too many kinds to list
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"--compile can't be used: torch.compile needs {needs} on this machine, and failed with "
            f"{type(error).__name__}: {reason[:300]}"
        ) from error


def compile_denoiser(pipe: Any, backend: str = "inductor") -> None:
    """diffusers' regional compilation: the blocks that the denoiser repeats, for any number and size of rows.

    They are compiled when they first run, which the warm-up picture does. A kind of batch that it has not seen is
    compiled when it comes. Beyond `COMPILED_GRAPHS` of them torch warns, and runs a block as it is.
    """
    denoisers = [part for name in DENOISERS if isinstance(part := getattr(pipe, name, None), torch.nn.Module)]
    if not denoisers:
        raise ConfigError(f"--compile can't be used: a {type(pipe).__name__} has no {' or '.join(DENOISERS[:2])}")
    torch._dynamo.config.recompile_limit = COMPILED_GRAPHS
    # Else sizes that happen to be equal when a block is first seen, of a picture and of a layer, are taken to be one.
    torch.fx.experimental._config.use_duck_shape = False  # type: ignore[attr-defined]
    for denoiser in denoisers:
        try:
            denoiser.compile_repeated_blocks(dynamic=True, backend=backend)
        except (AttributeError, ValueError):
            raise ConfigError(
                f"--compile can't be used: diffusers names no repeated blocks of a {type(denoiser).__name__}"
            ) from None
