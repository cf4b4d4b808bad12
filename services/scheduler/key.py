"""What two requests must share to be in one group.

Role: derives `SamplingParamsKey`, rows and tokens of a request from its sampling params and from what its model says
of itself. Pure functions; it must not know workers, queues or the state of a request.

How many steps a request has is in the key only where its pipeline is called whole (request mode): step by step, each
row carries its own timestep. How far it is never is, nor is the solver, since each request is stepped by its own.
"""

from msgspec import Struct

from common.messages import ModelProfile
from common.params import LoraSpec, SamplingParams
from common.rows import row_tokens, true_cfg_scale, uses_cfg


class SamplingParamsKey(Struct, frozen=True):
    """Requests with equal keys may share a forward pass. A field that the model can mix is None, hence always equal."""

    height: int | None
    width: int | None
    num_frames: int | None
    cfg: bool | None  # whether classifier-free guidance is on
    guidance_scale: float | None
    true_cfg_scale: float | None
    max_sequence_length: int | None  # text tokens
    lora: tuple[LoraSpec, ...] | None
    num_inference_steps: int | None
    negative_prompt: bool | None  # whether one is given: a pipeline that is called whole takes one for all, or for none


class RequestShape(Struct, frozen=True):
    """What one request adds to a forward pass."""

    key: SamplingParamsKey
    rows: int  # 2 with classifier-free guidance, else 1
    row_tokens: int  # image tokens of one row

    @property
    def tokens(self) -> int:
        """Image tokens, summed over its rows."""
        return self.rows * self.row_tokens


def request_shape(params: SamplingParams, profile: ModelProfile) -> RequestShape:
    """Key and size of a request on a model."""
    cfg = uses_cfg(params, profile)
    mixes = profile.mixes
    mixes_resolution = "resolution" in mixes
    mixes_guidance = "guidance" in mixes
    key = SamplingParamsKey(
        height=None if mixes_resolution else params.height,
        width=None if mixes_resolution else params.width,
        num_frames=None if "num_frames" in mixes else params.num_frames,
        cfg=None if "cfg" in mixes else cfg,
        guidance_scale=None if mixes_guidance else params.guidance_scale,
        true_cfg_scale=None if mixes_guidance else _effective_true_cfg_scale(params, profile, cfg),
        max_sequence_length=None if "max_sequence_length" in mixes else params.max_sequence_length,
        lora=None if "lora" in mixes else params.lora,
        num_inference_steps=None if "steps" in mixes else params.num_inference_steps,
        negative_prompt=None if "steps" in mixes else params.negative_prompt is not None,
    )
    tokens = row_tokens(params.height, params.width, params.num_frames, profile.size)
    return RequestShape(key=key, rows=2 if cfg else 1, row_tokens=tokens)


def _effective_true_cfg_scale(params: SamplingParams, profile: ModelProfile, cfg: bool) -> float | None:
    """The scale if it has any effect. It has none on a model that does not heed it, nor with its guidance off.

    `guidance_scale` is not treated so: some models embed it even with classifier-free guidance off.
    """
    if profile.cfg.scale_field == "true_cfg_scale":
        return true_cfg_scale(params, profile) if cfg else None
    return true_cfg_scale(params, profile) if "true_cfg_scale" in profile.accepts else None
