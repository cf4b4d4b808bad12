"""What a request comes to on a model: whether guidance is on, and how many image tokens a row has.

Role: pure functions of sampling params and a model's profile, for all who must agree on them.
"""

from common.messages import ModelProfile, SizeRule
from common.params import SamplingParams


def true_cfg_scale(params: SamplingParams, profile: ModelProfile) -> float | None:
    """The request's own, or the model's default; None where the model has none."""
    return profile.default_true_cfg_scale if params.true_cfg_scale is None else params.true_cfg_scale


def cfg_scale(params: SamplingParams, profile: ModelProfile) -> float | None:
    """The value that the model's `CfgRule` compares; None where there is none."""
    if profile.cfg.scale_field == "guidance_scale":
        return params.guidance_scale
    return true_cfg_scale(params, profile)


def uses_cfg(params: SamplingParams, profile: ModelProfile) -> bool:
    """Whether classifier-free guidance is on, by the model's own rule: two rows instead of one."""
    scale = cfg_scale(params, profile)
    if scale is None or scale <= profile.cfg.threshold:
        return False
    return params.negative_prompt is not None or not profile.cfg.needs_negative_prompt


def row_tokens(height: int, width: int, num_frames: int, rule: SizeRule) -> int:
    """Image tokens of one row of a picture or video of that size."""
    side = rule.pixels_per_token
    frames = 1 + -(-(num_frames - 1) // rule.frames_per_token)
    return -(-height // side) * -(-width // side) * frames
