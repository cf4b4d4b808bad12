"""The reference: what the diffusers pipeline draws when it is called alone."""

import copy
import functools
import inspect
from typing import Any
from weakref import WeakKeyDictionary

import diffusers
import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image

from common.params import SamplingParams
from services.worker.pipelines.protocol import StepPipeline

_KNOWN: WeakKeyDictionary[StepPipeline, dict[SamplingParams, list[Image.Image]]] = WeakKeyDictionary()


def diffusers_pipeline(pipeline: StepPipeline) -> Any:
    """The real diffusers pipeline inside a step pipeline."""
    pipe: Any = pipeline._pipe  # type: ignore[attr-defined]
    pipe.set_progress_bar_config(disable=True)
    return pipe


def in_its_terms(pipeline: StepPipeline, params: SamplingParams) -> SamplingParams:
    """What every family is asked for, as a user of this one would ask it.

    A model that is guided by `true_cfg_scale` gets the guidance there, with a negative prompt, which it needs. Where
    that is off by default, `guidance_scale` is an input of the model and stays. What a test says of `true_cfg_scale`
    itself stays too.
    """
    profile = pipeline.profile("m", params.num_inference_steps)
    if params.true_cfg_scale is not None or profile.cfg.scale_field != "true_cfg_scale":
        return params
    is_input = (profile.default_true_cfg_scale or 0.0) <= profile.cfg.threshold
    return replace(
        params,
        guidance_scale=params.guidance_scale if is_input else profile.default_guidance_scale,
        true_cfg_scale=params.guidance_scale,
        negative_prompt=params.negative_prompt or "",
    )


def draw_solo(pipeline: StepPipeline, params: SamplingParams) -> Image.Image:
    """The picture of one request, by one call of the diffusers pipeline."""
    return draw_solo_frames(pipeline, params)[0]


def known_solo(pipeline: StepPipeline, params: SamplingParams) -> Image.Image:
    """The same, drawn once: for tests that change nothing of the pipeline."""
    return known_solo_frames(pipeline, params)[0]


def known_solo_frames(pipeline: StepPipeline, params: SamplingParams) -> list[Image.Image]:
    """`draw_solo_frames`, drawn once."""
    known = _KNOWN.setdefault(pipeline, {})
    if params not in known:
        known[params] = draw_solo_frames(pipeline, params)
    return known[params]


def draw_solo_frames(pipeline: StepPipeline, params: SamplingParams) -> list[Image.Image]:
    """The frames of one request, of which a picture has one, by one call of the diffusers pipeline."""
    pipe = diffusers_pipeline(pipeline)
    params = in_its_terms(pipeline, params)
    choices: dict[str, Any] = {
        "negative_prompt": params.negative_prompt,  # None is not the default of all of them
        "max_sequence_length": params.max_sequence_length,
        "true_cfg_scale": params.true_cfg_scale,
        "num_frames": params.num_frames if "num_frames" in pipeline.profile("m", 1).accepts else None,
    }
    takes = inspect.signature(type(pipe).__call__).parameters
    if params.negative_prompt is not None and "negative_prompt" not in takes:
        length = params.max_sequence_length or takes["max_sequence_length"].default
        embeds, _ = pipe.encode_prompt(params.negative_prompt, max_sequence_length=length)
        choices |= {"negative_prompt": None, "negative_prompt_embeds": embeds}
    for field, values in (("sigmas", params.sigmas), ("timesteps", params.timesteps)):
        choices[field] = None if values is None else np.array(values)
    generator = torch.Generator("cpu").manual_seed(params.seed)
    drawn = _with_solver(pipe, params, generator)(
        prompt=params.prompt,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=generator,
        **{name: value for name, value in choices.items() if value is not None},
        output_type="pil",
    )
    frames: list[Image.Image] = drawn.frames[0] if "frames" in drawn else drawn.images
    return frames


def _with_solver(pipe: Any, params: SamplingParams, generator: torch.Generator) -> Any:
    """The pipeline with the solver that is asked for, set as diffusers' documentation says."""
    solver_class, config = type(pipe.scheduler), pipe.scheduler.config
    options: dict[str, Any] = {}
    if params.scheduler is not None:
        if params.scheduler.name != solver_class.__name__:
            solver_class = getattr(diffusers, params.scheduler.name)
            options = _for_a_flow_model(solver_class, config)
        options |= dict(params.scheduler.options)
    if solver_class is diffusers.DPMSolverSDEScheduler:
        options.setdefault("noise_sampler_seed", params.seed)
    view = copy.copy(pipe)
    view.scheduler = solver_class.from_config(config, **options)
    if not hasattr(pipe, "prepare_extra_step_kwargs") and "generator" in _arguments(view.scheduler.step):
        # Such a pipeline would let the solver draw its noise from the generator that all of torch shares.
        view.scheduler.step = functools.partial(view.scheduler.step, generator=generator)
    return view


def _for_a_flow_model(solver_class: Any, config: Any) -> dict[str, Any]:
    """What makes a solver of another kind solve a flow model, where `config` is of one."""
    shift = config.get("flow_shift") if config.get("use_flow_sigmas") else config.get("shift")
    if shift is None:
        return {}
    told = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift, "shift": shift}
    return {name: value for name, value in told.items() if name in _arguments(solver_class.__init__)}


def _arguments(function: Any) -> Any:
    return inspect.signature(function).parameters


def worst_difference(one: Image.Image, other: Image.Image) -> int:
    """The largest difference of any channel of any pixel, of 255."""
    return int(np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).max())
