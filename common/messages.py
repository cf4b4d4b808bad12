"""The wire contract: every message between gateway, scheduler and worker.

Role: the one vocabulary of the three kinds of process. The messages addressed to the scheduler are also the events of
its core. Struct definitions only: no I/O, no defaults that depend on a machine, no behaviour.

Rules of the contract
- MessagePack maps, tagged by `type`. A new field goes last and has a default; a field is never renamed or reused.
  Unknown fields are ignored, so an old reader takes a new message. An unknown tag is a `ProtocolError`, and so is an
  unknown value of a `Literal`: a new one (a code of an error, a status) raises `PROTOCOL_VERSION`, which must be equal.
- A peer's id (`gateway_id`, `worker_id`) is its name plus a suffix drawn at each boot: it is the ZeroMQ routing id and
  the boot id in one. The scheduler's epoch is `scheduler_boot_id`.
- Large bytes are not in here. A message marked *payload* is followed by one more ZeroMQ frame that holds them.
- Step indices are absolute: `step_index` is the number of denoise steps that a request has behind it, `until_step` the
  number that it may reach. Nothing on the wire is a relative count of steps.
- `attempt` counts the dispatches of a request to a worker, from 1. A worker echoes it in all that it says of a request.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from common.errors import ErrorInfo
from common.params import DiffusionRequest, OutputFormat

PROTOCOL_VERSION = 3

RequestStatus = Literal[
    "waiting",  # queued at the scheduler or, after its restart, held for the worker that the request was on
    "preparing",  # on a worker; its prompt is being encoded
    "ready",  # resident, may join the running batch
    "running",  # in the newest plan
    "preempted",  # resident and part-way, but not in the newest plan
    "decoding",  # all steps done; the picture is being decoded, encoded and delivered
    "finished_completed",
    "finished_aborted",
    "finished_error",
]

Positive = Annotated[int, Meta(ge=1)]

ResidentPhase = Literal["preparing", "denoising", "decoding"]


class Message(Struct, frozen=True, omit_defaults=True, tag=True, tag_field="type"):
    """Base of everything that is sent."""


# --------------------------------------------------------------------------------------------------------------------
# Records inside messages


class CfgRule(Struct, frozen=True, omit_defaults=True):
    """When a model's classifier-free guidance is on, which makes a request two rows instead of one.

    It is on if `params.<scale_field> > threshold` and, where `needs_negative_prompt`, a negative prompt is given.
    """

    scale_field: Literal["guidance_scale", "true_cfg_scale"] = "guidance_scale"
    threshold: float = 1.0  # infinite: a distilled model, which has none
    needs_negative_prompt: bool = False


class SizeRule(Struct, frozen=True, omit_defaults=True):
    """Which sizes a model can draw. All in pixels, but for the last."""

    multiple: Positive  # height and width must be multiples of this
    min_side: Positive
    max_side: Positive
    max_pixels: Positive  # height * width at most
    pixels_per_token: Positive  # side of the square that one image token of the denoiser covers
    # Frames that one covers, but for a video's first one, which has tokens of its own: so num_frames must be one more
    # than a multiple of this.
    frames_per_token: Positive = 1


class ModelProfile(Struct, frozen=True, omit_defaults=True):
    """What a worker says of its model: all that gateway and scheduler need to validate, route and batch requests."""

    model: str  # the name that a request's `model` must have
    pipeline: str  # diffusers class name, for people
    size: SizeRule
    default_height: int
    default_width: int
    default_num_inference_steps: int
    default_guidance_scale: float
    max_num_inference_steps: int
    # What may differ between the requests of one group, beside prompt and seed: "steps", "guidance", "cfg",
    # "resolution", "num_frames", "max_sequence_length", "lora". All else must be equal (`SamplingParamsKey`).
    mixes: tuple[str, ...] = ("steps",)
    cfg: CfgRule = CfgRule()
    accepts: tuple[str, ...] = ()  # optional `SamplingParams` fields that it heeds, e.g. "lora", "true_cfg_scale"
    default_true_cfg_scale: float | None = None
    default_num_frames: int = 1
    max_num_frames: int = 1
    default_max_sequence_length: int | None = None  # text tokens; None: the model has no such choice
    max_sequence_length_limit: int = 0  # the largest that may be asked for
    schedulers: tuple[str, ...] = ()  # diffusers' solver classes that a request may name; the first is the default


class StepCost(Struct, frozen=True, omit_defaults=True):
    """Seconds of one denoise step of a group: `max(floor_s, sum over rows of (per_token_s·n + per_token2_s·n²))`,
    n being the row's image tokens."""

    floor_s: float
    per_token_s: float
    per_token2_s: float = 0.0


class WorkerLimits(Struct, frozen=True, omit_defaults=True):
    """How much a worker takes at once. 0, where it may stand, means: no limit of this kind."""

    max_num_seqs: Positive  # requests in one step
    max_residents: Positive  # requests on the worker, in any phase
    max_rows: int = 0  # rows in one forward
    max_tokens: int = 0  # image tokens in one forward, summed over rows
    max_bytes: int = 0  # device memory that residents may take


class Resident(Struct, frozen=True, omit_defaults=True):
    """One request that a worker holds."""

    request_id: str
    attempt: int
    phase: ResidentPhase
    step_index: int = 0
    total_steps: int = 0  # 0 until it is prepared


class PlannedRequest(Struct, frozen=True, omit_defaults=True):
    """One member of a group."""

    request_id: str
    attempt: int
    until_step: int  # it may run until its step_index is this, and no further before a newer plan


class Group(Struct, frozen=True, omit_defaults=True):
    """Requests that share one forward pass of a step."""

    requests: tuple[PlannedRequest, ...]


class CheckpointRef(Struct, frozen=True, omit_defaults=True):
    """A checkpoint at the request's data home to go on from, instead of step 0."""

    step_index: int
    attempt: int  # the attempt that made it


class NewRequest(Struct, frozen=True, omit_defaults=True):
    """A request that the worker is to hold and prepare."""

    request: DiffusionRequest
    attempt: int
    resume: CheckpointRef | None = None


class ReleasedRequest(Struct, frozen=True, omit_defaults=True):
    """A request that the worker is to forget, whatever it is doing with it."""

    request_id: str
    attempt: int
    reason: Literal["completed", "aborted", "error", "superseded"]


class Progress(Struct, frozen=True, omit_defaults=True):
    """How far a request is after a step."""

    request_id: str
    attempt: int
    step_index: int


class Failure(Struct, frozen=True, omit_defaults=True):
    """A request that a step ended."""

    request_id: str
    attempt: int
    error: ErrorInfo


class GroupTiming(Struct, frozen=True, omit_defaults=True):
    """What one group cost in one step."""

    requests: int
    rows: int
    tokens: int  # image tokens, summed over rows
    seconds: float


class StageTimings(Struct, frozen=True, omit_defaults=True):
    """Seconds a request spent in each stage on its worker."""

    encode_s: float = 0.0
    denoise_s: float = 0.0  # from its first step's start to its last step's end, preemption included
    decode_s: float = 0.0
    image_s: float = 0.0  # writing the image file


class RequestClaim(Struct, frozen=True, omit_defaults=True):
    """What a gateway last heard of a request that it submits again."""

    request_id: str
    worker_id: str
    attempt: int
    step_index: int
    died_on: tuple[str, ...] = ()  # as in `RequestUpdate`


class ModelStatus(Struct, frozen=True, omit_defaults=True):
    """A model that is being served, or was and may be again."""

    profile: ModelProfile
    workers: int  # live workers that serve it and have drawn their warm-up picture; 0: none at present


# --------------------------------------------------------------------------------------------------------------------
# To the scheduler, from gateways


class GatewayHello(Message, frozen=True):
    """First word of a gateway to a scheduler epoch, and its answer to `Welcome`."""

    gateway_id: str
    protocol_version: int
    scheduler_boot_id: str = ""  # the epoch it answers, empty before any


class GatewayHeartbeat(Message, frozen=True):
    """Every heartbeat interval. Silence aborts the gateway's requests: nobody is left to take the pictures."""

    gateway_id: str
    scheduler_boot_id: str
    pending: int = 0  # requests that its clients wait for


class SubmitRequests(Message, frozen=True):
    """The requests of one API call, accepted all or none. Sent again until answered; idempotent by `request_id`."""

    gateway_id: str
    requests: tuple[DiffusionRequest, ...]
    claims: tuple[RequestClaim, ...] = ()


class AbortRequest(Message, frozen=True):
    """Nobody wants these any more."""

    gateway_id: str
    request_ids: tuple[str, ...]
    reason: str = ""


# To the scheduler, from workers


class WorkerHello(Message, frozen=True):
    """First word of a worker to a scheduler epoch, once its warm-up picture is drawn, and its answer to `Welcome`."""

    worker_id: str
    protocol_version: int
    scheduler_boot_id: str  # the epoch it answers, empty before any
    profile: ModelProfile
    cost: StepCost
    limits: WorkerLimits
    residents: tuple[Resident, ...] = ()
    last_step_id: int = 0  # newest plan received in this epoch
    step_execution: bool = True  # False: request mode, a whole pipeline call on a static batch
    device: str = ""  # for people


class RequestReady(Message, frozen=True):
    """A request is prepared. Its `step_index` is the only authority on where it starts."""

    worker_id: str
    request_id: str
    attempt: int
    step_index: int
    total_steps: int  # length of its timestep schedule, which some solvers make longer than num_inference_steps
    last_step_id: int = 0


class StepResult(Message, frozen=True):
    """One step boundary of a plan."""

    worker_id: str
    scheduler_boot_id: str
    step_id: int  # the plan that was run
    progress: tuple[Progress, ...] = ()
    failed: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()  # request ids of members that are not on the worker, or no longer
    plan_done: bool = False  # every member is at its `until_step` or gone: a pending plan starts, else the worker idles
    last_step_id: int = 0  # newest plan received, which may be newer than the one that was run
    timings: tuple[GroupTiming, ...] = ()
    idle_s: float = 0.0  # time on the step thread between the step before and this one


class RequestDone(Message, frozen=True):
    """A worker is through with a request, apart from failures of a step, which `StepResult` reports."""

    worker_id: str
    request_id: str
    attempt: int
    outcome: Literal["completed", "error"]  # completed: the gateway has acknowledged the picture
    error: ErrorInfo | None = None
    timings: StageTimings = StageTimings()


class WorkerHeartbeat(Message, frozen=True):
    """Every heartbeat interval: the worker's whole truth, from which a lost message heals."""

    worker_id: str
    scheduler_boot_id: str
    last_step_id: int
    idle: bool  # no group is running and none is pending
    residents: tuple[Resident, ...] = ()
    credit_stalled: bool = False  # finished pictures wait for a gateway to take them


class WorkerDraining(Message, frozen=True):
    """Nothing new, please. With `leaving`, this is the last word: what it holds must be made elsewhere."""

    worker_id: str
    scheduler_boot_id: str
    leaving: bool = False
    reason: str = ""
    failed: bool = False  # it leaves because it broke, perhaps of what it was at work on


# --------------------------------------------------------------------------------------------------------------------
# From the scheduler


class Welcome(Message, frozen=True):
    """Answer to an unknown peer or epoch: say hello to this one. To workers and gateways."""

    scheduler_boot_id: str
    protocol_version: int = PROTOCOL_VERSION


class Refused(Message, frozen=True):
    """Answer to a hello that can't be accepted (protocol version, another profile under a model's name)."""

    scheduler_boot_id: str
    error: ErrorInfo


class StepPlan(Message, frozen=True):
    """What a worker does next. Full state, not a difference; ordered by (scheduler_boot_id, step_id).

    `new` and `released` apply on receipt and are idempotent; both are repeated until the worker has confirmed a plan
    that held them. `groups` take effect at a step boundary, and at most one plan is pending: a newer one replaces it.
    A plan without groups is legal. One step runs each group once, for those of its members that are short of
    `until_step`.
    """

    scheduler_boot_id: str
    step_id: int
    groups: tuple[Group, ...] = ()
    new: tuple[NewRequest, ...] = ()
    released: tuple[ReleasedRequest, ...] = ()
    # "after_current": once every member of the running plan is at its `until_step`;
    # "next_boundary": after the step that is running.
    starts: Literal["after_current", "next_boundary"] = "after_current"


class DrainWorker(Message, frozen=True):
    """Hand over what you hold and leave."""

    scheduler_boot_id: str
    deadline_s: float


class RequestUpdate(Message, frozen=True):
    """Where a request stands.

    With an error or an abort it is terminal; `finished_completed` never is, since the picture travels on another link.
    """

    request_id: str
    status: RequestStatus
    attempt: int = 0
    worker_id: str = ""
    step_index: int = 0
    total_steps: int = 0
    queue_position: int = 0  # requests of its model before it, while it waits
    error: ErrorInfo | None = None
    retry_after_s: float | None = None  # with a refusal: when to try again
    estimated_s: float | None = None  # until it is finished, where the scheduler can say
    died_on: tuple[str, ...] = ()  # workers that died with it, and may have died of it; too many end it


class ModelsUpdate(Message, frozen=True):
    """All models and how many workers each has. To gateways, after their hello and at each change."""

    scheduler_boot_id: str
    models: tuple[ModelStatus, ...] = ()


# --------------------------------------------------------------------------------------------------------------------
# On the data link: worker to gateway


class ImageOutput(Message, frozen=True):
    """A finished picture. *payload*: the file. Sent again until `ImageAck`, or past a deadline."""

    request_id: str
    attempt: int
    worker_id: str
    output_format: OutputFormat
    width: int
    height: int
    nbytes: int  # of the payload
    total_steps: int = 0
    timings: StageTimings = StageTimings()
    warnings: tuple[str, ...] = ()
    num_frames: int = 1


class PreviewOutput(Message, frozen=True):
    """A picture of an unfinished request. *payload*: the file. Never acknowledged, may be dropped."""

    request_id: str
    attempt: int
    worker_id: str
    step_index: int
    index: int  # partial_image_index, from 0
    output_format: OutputFormat
    nbytes: int


class Checkpoint(Message, frozen=True):
    """All that is needed to go on with a request elsewhere, bit for bit. *payload*: a safetensors blob."""

    request_id: str
    attempt: int
    worker_id: str
    step_index: int
    total_steps: int
    nbytes: int


class FetchInput(Message, frozen=True):
    """Ask for an input picture."""

    request_id: str
    attempt: int
    worker_id: str
    role: Literal["image", "mask"]
    index: int


class FetchCheckpoint(Message, frozen=True):
    """Ask for the newest checkpoint."""

    request_id: str
    attempt: int
    worker_id: str


# On the data link: gateway to worker


class ImageAck(Message, frozen=True):
    """The gateway needs this picture no more: it was delivered, is a duplicate, or belongs to nobody."""

    request_id: str
    attempt: int
    known: bool  # False: nobody waits for it
    credit_bytes: int = 0  # unacknowledged bytes that this worker may have under way; 0: as before


class InputData(Message, frozen=True):
    """Answer to `FetchInput`. *payload*: the file as it was uploaded, empty if not found."""

    request_id: str
    attempt: int
    role: Literal["image", "mask"]
    index: int
    found: bool


class CheckpointData(Message, frozen=True):
    """Answer to `FetchCheckpoint`. *payload*: the safetensors blob, empty if not found."""

    request_id: str
    attempt: int
    found: bool
    step_index: int = 0


# --------------------------------------------------------------------------------------------------------------------
# One union for each receiver

FromGateway = GatewayHello | GatewayHeartbeat | SubmitRequests | AbortRequest
FromWorker = WorkerHello | RequestReady | StepResult | RequestDone | WorkerHeartbeat | WorkerDraining
ToScheduler = FromGateway | FromWorker
ToWorker = Welcome | Refused | StepPlan | DrainWorker
ToGateway = Welcome | Refused | RequestUpdate | ModelsUpdate
DataToGateway = ImageOutput | PreviewOutput | Checkpoint | FetchInput | FetchCheckpoint
DataToWorker = ImageAck | InputData | CheckpointData
FromScheduler = ToWorker | ToGateway
