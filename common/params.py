"""What a user asks for: one picture, with every value spelled out.

Role: the immutable description of a request, made by a gateway from an HTTP call and carried unchanged through
scheduler and worker. It knows nothing of lifecycle, workers or tensors. Field names are those of diffusers.

A gateway resolves defaults before it builds these, so that an explicit default and an absent field give equal values.
"""

from typing import Literal

from msgspec import Struct

OutputFormat = Literal["png", "jpeg", "webp", "mp4"]  # the last for videos, and for them alone
Priority = Literal["interactive", "standard", "batch"]


class LoraSpec(Struct, frozen=True):
    """One adapter to apply to one request."""

    name: str
    scale: float = 1.0


class SchedulerSpec(Struct, frozen=True):
    """A diffusers scheduler (solver) class by name, with changes to its config."""

    name: str
    options: tuple[tuple[str, str | int | float | bool], ...] = ()


class InputSpec(Struct, frozen=True):
    """An input picture that waits at the request's data home; the bytes travel on the data link only."""

    role: Literal["image", "mask"]
    index: int  # which one of its role
    nbytes: int
    sha256: str


class SamplingParams(Struct, frozen=True):
    """The parameters that decide a picture. Two requests with equal `SamplingParams` and model get the same picture."""

    prompt: str
    height: int  # pixels
    width: int  # pixels
    num_inference_steps: int
    guidance_scale: float
    seed: int  # of the request's own generator, 0 to 2**63 - 1
    negative_prompt: str | None = None
    num_frames: int = 1  # 1 for a picture, more for a video
    true_cfg_scale: float | None = None  # for models whose classifier-free guidance is apart from `guidance_scale`
    max_sequence_length: int | None = None  # text tokens; None: the pipeline's own default
    lora: tuple[LoraSpec, ...] = ()
    scheduler: SchedulerSpec | None = None  # None: the one that the checkpoint names
    sigmas: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    strength: float | None = None  # image to image: the share of the schedule that is run


class OutputParams(Struct, frozen=True):
    """How the finished picture is written to a file. It does not affect the denoising."""

    output_format: OutputFormat = "png"
    output_compression: int = 100  # 0 to 100: the quality of jpeg and webp; png is lossless and ignores it
    partial_images: int = 0


class DataHome(Struct, frozen=True):
    """Where a request's bytes live: the data link of the gateway that took it."""

    gateway_id: str
    address: str  # a ZeroMQ endpoint that workers connect to
    public_key: str = ""  # CURVE public key of the gateway (Z85), empty without CURVE


class DiffusionRequest(Struct, frozen=True):
    """One picture to make: one prompt, one seed, one output."""

    request_id: str  # made by the gateway, unique for ever, idempotent everywhere
    model: str
    params: SamplingParams
    home: DataHome
    output: OutputParams = OutputParams()
    priority: Priority = "standard"
    deadline_s: float | None = None  # seconds from its arrival at the scheduler
    inputs: tuple[InputSpec, ...] = ()
    tenant: str = ""  # whose it is, for fairness and limits; empty where nobody is told apart
