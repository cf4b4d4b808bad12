"""From a folder or a hub id to a `StepPipeline` or, for request mode, a `WholeCallPipeline`.

Role: read `model_index.json`, choose the family by its class name, load the diffusers pipeline onto the device. The one
table of families is here. Every failure to load is a `ConfigError` in plain words.
"""

import json
import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import msgspec
import numpy as np
import torch
import transformers

from common.errors import ConfigError
from services.worker.pipelines.flux import FluxStepPipeline
from services.worker.pipelines.flux2_klein import Flux2KleinStepPipeline
from services.worker.pipelines.pixart_sigma import PixArtSigmaStepPipeline
from services.worker.pipelines.protocol import ServingDefaults, StepPipeline
from services.worker.pipelines.qwen_image import QwenImageStepPipeline
from services.worker.pipelines.stable_diffusion import StableDiffusionStepPipeline
from services.worker.pipelines.stable_diffusion_3 import StableDiffusion3StepPipeline
from services.worker.pipelines.stable_diffusion_xl import StableDiffusionXLStepPipeline
from services.worker.pipelines.wan import WanStepPipeline
from services.worker.pipelines.whole_call import WholeCallPipeline, refuse_unservable
from services.worker.pipelines.z_image import ZImageStepPipeline
from services.worker.switches import Switches, place, refuse_unusable

DEFAULTS_FILE = "stepweave.json"
NO_SWITCHES = Switches()


class Family(NamedTuple):
    """How one diffusers class is served."""

    pipeline_class: Any  # of diffusers
    step_pipeline: Any  # called with (pipeline, device, defaults)


# By the `_class_name` of a checkpoint's model_index.json.
FAMILIES = {
    "FluxPipeline": Family(diffusers.FluxPipeline, FluxStepPipeline),
    "Flux2KleinPipeline": Family(diffusers.Flux2KleinPipeline, Flux2KleinStepPipeline),
    "StableDiffusionPipeline": Family(diffusers.StableDiffusionPipeline, StableDiffusionStepPipeline),
    "StableDiffusion3Pipeline": Family(diffusers.StableDiffusion3Pipeline, StableDiffusion3StepPipeline),
    "StableDiffusionXLPipeline": Family(diffusers.StableDiffusionXLPipeline, StableDiffusionXLStepPipeline),
    "PixArtSigmaPipeline": Family(diffusers.PixArtSigmaPipeline, PixArtSigmaStepPipeline),
    "QwenImagePipeline": Family(diffusers.QwenImagePipeline, QwenImageStepPipeline),
    "WanPipeline": Family(diffusers.WanPipeline, WanStepPipeline),
    "ZImagePipeline": Family(diffusers.ZImagePipeline, ZImageStepPipeline),
}


def load_pipeline(
    model: str, device: str = "auto", dtype: str = "auto", switches: Switches = NO_SWITCHES
) -> StepPipeline:
    """Loads `model`, a diffusers folder or a hub id. Raises `ConfigError` if it can't be served step by step."""
    index = _model_index(model)
    family = FAMILIES.get(str(index.get("_class_name")))
    if family is None:
        raise ConfigError(
            f"{model} is a {index.get('_class_name')}, which can't be run step by step; supported are: "
            f"{', '.join(FAMILIES)}; --no-step-execution serves any text-to-image pipeline of diffusers that can be "
            "served by its whole call"
        )
    pipe, torch_device = _load(family.pipeline_class, model, index, device, dtype, switches, step_execution=True)
    step_pipeline: StepPipeline = family.step_pipeline(pipe, torch_device, _serving_defaults(Path(model)))
    return step_pipeline


def load_whole_pipeline(
    model: str, device: str = "auto", dtype: str = "auto", switches: Switches = NO_SWITCHES
) -> WholeCallPipeline:
    """Loads `model`, a diffusers folder or a hub id, of whatever class. Raises `ConfigError` if it can't be loaded, or,
    before any weights are, if its call's signature shows that it can't be served."""
    index = _model_index(model)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(f"{model} needs code of its own ({name}), which is not run: only diffusers' classes are")
    pipeline_class = getattr(diffusers, name, None)
    if not (isinstance(pipeline_class, type) and issubclass(pipeline_class, diffusers.DiffusionPipeline)):
        raise ConfigError(f"{model} is a {name}, and diffusers {diffusers.__version__} has no pipeline of that name")
    refuse_unservable(pipeline_class)
    pipe, torch_device = _load(pipeline_class, model, index, device, dtype, switches, step_execution=False)
    return WholeCallPipeline(pipe, torch_device, _serving_defaults(Path(model)))


def _load(
    pipeline_class: Any,
    model: str,
    index: dict[str, Any],
    device: str,
    dtype: str,
    switches: Switches,
    step_execution: bool,
) -> tuple[Any, torch.device]:
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    refuse_unusable(switches, torch_device)
    # Components that the index leaves empty must be named, or diffusers reports them as missing.
    absent = {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}
    try:
        pipe = pipeline_class.from_pretrained(model, dtype=torch_dtype, **absent)
        place(pipe, torch_device, switches, step_execution)
    except ConfigError:
        raise
    except Exception as error:  # diffusers, transformers, safetensors and the hub raise too many kinds to list
        raise ConfigError(f"can't load {model}: {_first_line(error)}") from error
    return pipe, torch_device


def resolve_device(device: str) -> torch.device:
    """ "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{device!r} is no device; try cpu, cuda or cuda:1") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {device} here: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU, where half precision is slow, and bfloat16 elsewhere."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in known:
        raise ConfigError(f"{dtype!r} is no dtype; known are auto, {', '.join(known)}")
    return known[dtype]


def _quiet_libraries() -> None:
    # They log the cut-off part of prompts, which is nobody's business but the client's, who is told by a warning.
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # It says of nearly every step that two times differ in the last digit of a float.
    warnings.filterwarnings("ignore", category=UserWarning, module="torchsde")
    # Of the arithmetic of solvers with odd options, whose outcome is looked at.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="diffusers")
    warnings.filterwarnings("ignore", category=np.exceptions.ComplexWarning)
    # What is left goes where all log lines go. Each has a handler of its own, which writes lines of another form.
    for library in (diffusers, transformers):
        library.utils.logging.disable_default_handler()
        library.utils.logging.enable_propagation()
    hub = logging.getLogger("huggingface_hub")
    hub.handlers.clear()
    hub.propagate = True


def _model_index(model: str) -> dict[str, Any]:
    _quiet_libraries()
    folder = Path(model)
    if folder.is_dir():
        file = folder / "model_index.json"
        if not file.is_file():
            raise ConfigError(f"{model} is no diffusers folder: it has no model_index.json")
        try:
            index = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} can't be read: {error}") from None
        if not isinstance(index, dict):
            raise ConfigError(f"{file} can't be read: it is no JSON object")
        return index
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(f"there is no folder {model}, and it is no hub id (owner/name) either")
    try:
        loaded: dict[str, Any] = dict(diffusers.DiffusionPipeline.load_config(model))
    except Exception as error:  # the hub's client raises too many kinds to list
        raise ConfigError(
            f"there is no folder {model} here, and no model_index.json could be had from the hub: the name is wrong, "
            f"it needs a token, or the hub can't be reached ({_first_line(error)})"
        ) from error
    return loaded


def _serving_defaults(folder: Path) -> ServingDefaults:
    file = folder / DEFAULTS_FILE
    if not file.is_file():
        return ServingDefaults()
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServingDefaults)
    except msgspec.DecodeError as error:
        known = ", ".join(ServingDefaults.__struct_fields__)
        raise ConfigError(f"{file} can't be used: {error}; known settings are: {known}") from None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
