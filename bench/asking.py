"""How a model is asked for pictures, by what its profile says of it: sizes, steps, and its own kind of guidance.

Role: pure functions from a `ModelProfile` to shapes and `SamplingParams`. It knows no families and no torch.
"""

from msgspec.structs import replace

from bench.workload import PROMPTS, Shape, call_seed
from common.messages import ModelProfile
from common.params import SamplingParams
from common.rows import cfg_scale, uses_cfg

MAX_STEPS = 1000  # of the profile that a pipeline is asked for: more than anybody measures with


def own_shape(profile: ModelProfile) -> Shape:
    """What the model draws if nothing is said."""
    return Shape(profile.default_width, profile.default_height, profile.default_num_inference_steps)


def sampling_params(
    profile: ModelProfile, shape: Shape, guidance: float | None = None, number: int = 0
) -> SamplingParams:
    """The `number`-th picture of that shape; of a video model one frame.

    `guidance` is of classifier-free guidance: the value of the field that the model's `CfgRule` compares, with a
    negative prompt where the rule wants one. None: what the model does if nothing is said.
    """
    params = SamplingParams(
        prompt=PROMPTS[number % len(PROMPTS)],
        height=shape.height,
        width=shape.width,
        num_inference_steps=shape.num_inference_steps,
        guidance_scale=profile.default_guidance_scale,
        seed=call_seed(0, number),
    )
    if guidance is None:
        return params
    negative_prompt = "" if profile.cfg.needs_negative_prompt else None
    return replace(params, negative_prompt=negative_prompt, **{profile.cfg.scale_field: guidance})


def guidance_in_words(params: SamplingParams, profile: ModelProfile) -> str:
    """For a table's title."""
    if not uses_cfg(params, profile):
        return "no classifier-free guidance"
    return f"guidance {cfg_scale(params, profile):g}"
