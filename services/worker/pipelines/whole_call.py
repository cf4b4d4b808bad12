"""Request mode: any text-to-image pipeline of diffusers, by its whole call (`WholeCallPipeline`).

Role: what a call's signature says about whether and how it can be served, the arguments of a call for a static batch,
and its pictures. A batch of one is called with plain values: a request drawn alone *is* the diffusers pipeline called
alone with `generator=torch.Generator("cpu").manual_seed(seed)`. Whether a batch of several gives the same is measured
at the start (`services/worker/request_warmup.py`), not assumed.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from common.errors import ConfigError, ErrorInfo, RequestError
from common.messages import CfgRule, ModelProfile, SizeRule
from common.params import DiffusionRequest
from services.worker.pipelines.preparing import TextLimit, call_default, cuts, refuse_unsupported
from services.worker.pipelines.protocol import ServingDefaults
from services.worker.request_batch import DiffusionRequestBatch, Drawn, GivenUpError, RequestState

MAX_SIDE = 2048  # of a model that does not say; what it can't draw ends as that request's error
MAX_SEQUENCE_LENGTH = 512  # as SD 3 and Flux allow; a pipeline that takes less says so in its error
UNTOLD_STEPS = 50  # num_inference_steps of a call that has no default for it
NO_GUIDANCE = 1.0  # the guidance_scale of a model whose call takes none
GUIDED = 5.0  # a guidance scale that is on in every pipeline
# Words in the names of what a call takes besides a prompt, for the one who tries to serve it.
_INPUTS = ("mask", "image", "video", "audio")
_EMBEDS = "embed"  # of what another pipeline makes
_OPTIONAL_INPUTS = ("image", "mask_image", "control_image", "video", "audio")  # often None by default and needed still
_FLAGS = ("nsfw_content_detected", "nsfw_detected")  # of an output: what its safety checker found, one for each picture


class WholeCallPipeline:
    """A loaded diffusers pipeline (`Any`: its components have no static types) and how it is called."""

    def __init__(self, pipe: Any, device: torch.device, defaults: ServingDefaults) -> None:
        refuse_unservable(type(pipe))
        pipe.set_progress_bar_config(disable=True)
        self.device = device
        self._pipe = pipe
        self._defaults = defaults
        self._takes = frozenset(inspect.signature(type(pipe).__call__).parameters)
        self._guidance: float | None = self._default("guidance_scale")
        self._true_cfg_scale: float | None = self._default("true_cfg_scale")
        self._max_sequence_length: int | None = self._default("max_sequence_length")
        optional = {"true_cfg_scale": self._true_cfg_scale, "max_sequence_length": self._max_sequence_length}
        self._accepts = tuple(name for name, default in optional.items() if default is not None)
        self._dtypes = {name: part.dtype for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        # Copies, because tokenizers keep padding and truncation as state and the call may be using its own just now.
        self._tokenizers = {
            name: copy.deepcopy(part)
            for name, part in pipe.components.items()
            if type(part).__name__.startswith(("CLIPTokenizer", "T5Tokenizer"))
        }

    @property
    def name(self) -> str:
        return type(self._pipe).__name__

    @property
    def exact(self) -> bool:
        """Whether rounding alone is too small to be seen: it is in float32."""
        return bool(self._pipe.dtype == torch.float32)

    @property
    def takes_negative_prompt(self) -> bool:
        return "negative_prompt" in self._takes

    @property
    def takes_size(self) -> bool:
        return {"height", "width"} <= self._takes

    @property
    def default_steps(self) -> int:
        return int(self._default("num_inference_steps") or UNTOLD_STEPS)

    @property
    def default_guidance_scale(self) -> float:
        return NO_GUIDANCE if self._guidance is None else self._guidance

    @property
    def guided_params(self) -> dict[str, float]:
        """Params with which guidance is on for certain, for what takes guidance and has it off by default."""
        defaults = {"guidance_scale": self._guidance, "true_cfg_scale": self._true_cfg_scale}
        return {name: GUIDED for name, default in defaults.items() if default is not None and default <= NO_GUIDANCE}

    @property
    def unfilled_inputs(self) -> list[str]:
        """Pictures and the like that the call takes and that no request has."""
        return [name for name in _OPTIONAL_INPUTS if name in self._takes]

    def smallest_side(self, default_height: int, default_width: int) -> int:
        """In pixels, of a model that draws other sizes than its own."""
        return min(4 * self.grid, default_height, default_width)

    def profile(
        self, model: str, max_num_inference_steps: int, default_height: int, default_width: int, other_sizes: bool
    ) -> ModelProfile:
        """As a `StepPipeline`'s. The default size, in pixels, is what the pipeline draws when it is told none."""
        grid = self.grid
        sides = (default_height, default_width)
        if other_sizes:
            max_side = max(self._defaults.max_side or self._largest_side, *sides)
            size = SizeRule(
                multiple=grid,
                min_side=self.smallest_side(*sides),
                max_side=max_side,
                max_pixels=max_side * max_side,
                pixels_per_token=grid,
            )
        else:
            size = SizeRule(
                multiple=math.gcd(*sides),
                min_side=min(sides),
                max_side=max(sides),
                max_pixels=default_height * default_width,
                pixels_per_token=grid,
            )
        longest = self._max_sequence_length
        return ModelProfile(
            model=model,
            pipeline=self.name,
            size=size,
            default_height=default_height,
            default_width=default_width,
            default_num_inference_steps=min(self.default_steps, max_num_inference_steps),
            default_guidance_scale=self.default_guidance_scale,
            max_num_inference_steps=max_num_inference_steps,
            mixes=(),
            cfg=CfgRule() if self._true_cfg_scale is None else CfgRule("true_cfg_scale", needs_negative_prompt=True),
            accepts=self._accepts,
            default_true_cfg_scale=self._true_cfg_scale,
            default_max_sequence_length=longest,
            max_sequence_length_limit=0 if longest is None else max(longest, MAX_SEQUENCE_LENGTH),
        )

    def prepare_encode(self, request: DiffusionRequest) -> RequestState:
        """Refuses what the call does not take. Nothing is encoded: that is part of the call."""
        lacks: dict[str, Any] = {}
        if not self.takes_negative_prompt:
            lacks["negative_prompt"] = None
        if self._guidance is None:
            lacks["guidance_scale"] = NO_GUIDANCE
        refuse_unsupported(request, self._accepts, lacks)
        params = request.params
        limits = [
            TextLimit(name, tokenizer, limit)
            for name, tokenizer in self._tokenizers.items()
            if (limit := self._text_limit(tokenizer, params.max_sequence_length)) is not None
        ]
        texts = {"prompt": params.prompt, "negative_prompt": params.negative_prompt or ""}
        return RequestState(
            request, warnings=tuple(f"{field} {cut}" for field, text in texts.items() for cut in cuts(text, limits))
        )

    def draw(
        self,
        batch: DiffusionRequestBatch,
        given_up: Callable[[], bool] = lambda: False,
        *,
        output_type: str = "np",
        sizes: bool = True,
    ) -> list[Drawn]:
        """One call. Raises whatever the pipeline raises and, where the pipeline calls back after each denoise step,
        `GivenUpError` once all are `given_up`. Without `sizes` the pipeline's own size is drawn.

        As "np" a picture is as the decoder made it, so that NaN can be seen; as "pil" it is rounded to bytes.
        """
        try:
            output = self._pipe(**self._arguments(batch, given_up, output_type, sizes))
        except BaseException:
            self._restore_dtypes()
            self._pipe.maybe_free_model_hooks()  # where it offloads, the last component would stay until the next call
            raise
        images = getattr(output, "images", getattr(output, "image", None))
        if images is None:
            parts = ", ".join(output) if isinstance(output, Mapping) else "no fields"
            raise TypeError(f"the call gives no images but a {type(output).__name__} with {parts}")
        if len(images) != len(batch):
            raise ValueError(f"the call gives {len(images)} pictures for {len(batch)} prompts")
        pictures = [_as_array(image) for image in images]
        flags = next((found for name in _FLAGS if (found := getattr(output, name, None)) is not None), None)
        flags = [False] * len(batch) if flags is None else flags
        return [Drawn(picture, bool(flag)) for picture, flag in zip(pictures, flags, strict=True)]

    def post_decode(self, state: RequestState) -> Image.Image:
        """The finished picture, whose array the state then has no more.

        Raises `RequestError`: `content_policy_violation`, `non_finite`, or `generation_failed` for a picture of another
        size than asked for.
        """
        assert state.drawn is not None
        drawn, state.drawn = state.drawn, None
        if drawn.flagged:
            raise RequestError(
                ErrorInfo("content_policy_violation", "the model's safety checker refused the picture it drew")
            )
        if not np.isfinite(drawn.picture).all():
            raise RequestError(ErrorInfo("non_finite", "the decoded picture holds values that are not numbers"))
        params = state.request.params
        height, width = drawn.picture.shape[:2]
        if (height, width) != (params.height, params.width):
            text = f"{self.name} drew {width}x{height} pixels where {params.width}x{params.height} were asked for"
            raise RequestError(ErrorInfo("generation_failed", text, "size"))
        return to_image(drawn.picture)

    def _arguments(
        self, batch: DiffusionRequestBatch, given_up: Callable[[], bool], output_type: str, sizes: bool
    ) -> dict[str, Any]:
        params = batch.params
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds]
        alone = len(batch) == 1
        arguments: dict[str, Any] = {
            "prompt": batch.prompts[0] if alone else batch.prompts,
            "num_inference_steps": params.num_inference_steps,
            "generator": generators[0] if alone else generators,
            "output_type": output_type,
        }
        if batch.negative_prompts is not None:
            arguments["negative_prompt"] = batch.negative_prompts[0] if alone else batch.negative_prompts
        if self.takes_size and sizes:
            arguments |= {"height": params.height, "width": params.width}
        if self._guidance is not None:
            arguments["guidance_scale"] = params.guidance_scale
        if self._true_cfg_scale is not None:
            given = params.true_cfg_scale
            arguments["true_cfg_scale"] = self._true_cfg_scale if given is None else given
        if self._max_sequence_length is not None:
            arguments["max_sequence_length"] = params.max_sequence_length or self._max_sequence_length
        if "callback_on_step_end" in self._takes:
            arguments["callback_on_step_end"] = _leaving_when(given_up)
        return arguments

    def _restore_dtypes(self) -> None:
        """After a call that was left half-way: some pipelines decode in float32 and go back only if all went well."""
        for name, dtype in self._dtypes.items():
            component = getattr(self._pipe, name)
            if component.dtype != dtype:
                component.to(dtype=dtype)

    @property
    def grid(self) -> int:
        """Pixels that sides are multiples of, so that no pipeline rounds them to a size that was not asked for."""
        return math.lcm(8, 2 * int(getattr(self._pipe, "vae_scale_factor", 8)))

    @property
    def _largest_side(self) -> int:
        """In pixels. Where positions are looked up in a table, a picture can't have more of them than that."""
        config = getattr(getattr(self._pipe, "transformer", None), "config", {})
        table = config.get("pos_embed_max_size") if hasattr(config, "get") else None
        if not table:
            return MAX_SIDE
        pixels = int(getattr(self._pipe, "vae_scale_factor", 8)) * int(config.get("patch_size") or 1)
        return min(int(table) * pixels // self.grid * self.grid, MAX_SIDE)

    def _default(self, parameter: str) -> Any:
        """What is served if a request has no value; None: the call has no such choice, or makes it by itself."""
        if parameter not in self._takes:
            return None
        own = getattr(self._defaults, f"default_{parameter}", None)
        return call_default(type(self._pipe), parameter) if own is None else own

    def _text_limit(self, tokenizer: Any, max_sequence_length: int | None) -> int | None:
        if type(tokenizer).__name__.startswith("T5"):
            return max_sequence_length or self._max_sequence_length
        return int(tokenizer.model_max_length)


def refuse_unservable(pipeline_class: type) -> None:
    """Raises `ConfigError` if the signature of the class's call shows that prompts alone can't be served with it."""
    parameters = inspect.signature(pipeline_class.__call__).parameters
    needed = [
        name
        for name, parameter in list(parameters.items())[1:]  # without `self`
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name != "prompt"
    ]
    reason = None
    if needed:
        kinds = [next((word for word in _INPUTS if word in name), None) for name in needed]
        kind = next((kind for kind in kinds if kind is not None), None)
        what = f"an input {kind}" if kind is not None else "more than a prompt"
        if any(_EMBEDS in name for name in needed):
            what = "what another pipeline makes (the class that combines both, if there is one, may be served)"
        reason = f"it needs {what}: its call can't do without {', '.join(needed)}"
    elif "prompt" not in parameters:
        reason = "it takes no prompt"
    elif "num_frames" in parameters:
        reason = "it draws videos: its call takes num_frames"
    elif "generator" not in parameters:
        reason = "it takes no generator, so that no picture could be made again from its seed"
    elif "num_inference_steps" not in parameters:
        reason = "it takes no num_inference_steps"
    elif "output_type" not in parameters:
        reason = "it takes no output_type"
    if reason is not None:
        raise ConfigError(f"a {pipeline_class.__name__} can't be served by its whole call: {reason}")


def to_image(picture: np.ndarray) -> Image.Image:
    """(height, width, channels) float32, 0 to 1, to the picture that diffusers makes of it as output_type="pil"."""
    image: Image.Image = VaeImageProcessor.numpy_to_pil(picture)[0]
    return image


def _as_array(image: Any) -> np.ndarray:
    if isinstance(image, Image.Image):
        return np.asarray(image, dtype=np.float32).reshape(image.height, image.width, -1) / 255
    picture = np.asarray(image, dtype=np.float32)
    if picture.ndim != 3 or picture.shape[2] not in (1, 3, 4):
        raise ValueError(f"the call gives something of shape {picture.shape} where a picture should be")
    return picture


def _leaving_when(given_up: Callable[[], bool]) -> Callable[..., dict[str, Any]]:
    """A `callback_on_step_end` that changes nothing, and ends the call once it is `given_up`."""

    def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if given_up():
            raise GivenUpError
        return {}

    return on_step_end
