"""What each process is told at its door, as frozen records.

Role: every setting once, with its type, bounds, meaning and default; flags, keys of the settings file and variables are
made from these fields (`services/settings.py`). They are read once, by the command line; below the door, functions get
the values that they need.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

SCHEDULER_ADDRESS = "tcp://127.0.0.1:5570"
DATA_ADDRESS = "tcp://127.0.0.1:5571"

HEARTBEAT_S = 0.5  # how often workers and gateways beat, and the scheduler looks
RECONCILE_S = 5.0  # for so long a scheduler that has just started waits for workers to say what they hold

PORT_MAX = 65_535
COUNT_MAX = 1_000_000  # of requests, steps, threads: more is a slip of the finger
BYTES_MAX = 2**31 - 1
SECONDS_MAX = 86_400.0

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
PolicyName = Literal["fifo"]
OffloadName = Literal["none", "model", "group"]

Host = Annotated[str, Meta(description="Address that the HTTP API listens on.")]
Port = Annotated[int, Meta(ge=1, le=PORT_MAX, description="Port of the HTTP API.")]
MaxBodyBytes = Annotated[int, Meta(ge=1, le=BYTES_MAX, description="The longest body that a call may have.")]
RequestTimeout = Annotated[
    float, Meta(gt=0, le=SECONDS_MAX, description="Seconds until an accepted request that has not ended is given up.")
]
Scheduler = Annotated[str, Meta(description="Address of the scheduler.")]
Policy = Annotated[PolicyName, Meta(description="Who runs next.")]
MaxQueue = Annotated[
    int, Meta(ge=1, le=COUNT_MAX, description="Requests that may wait, over all models; more are refused at once.")
]
SuspectAfter = Annotated[
    float, Meta(gt=0, le=SECONDS_MAX, description="Seconds of silence until a worker gets nothing new.")
]
LostAfter = Annotated[
    float, Meta(gt=0, le=SECONDS_MAX, description="Seconds of silence until a worker's work is done elsewhere.")
]
MaxAttempts = Annotated[
    int, Meta(ge=1, le=COUNT_MAX, description="Times that a request is given to a worker before it is given up.")
]
Model = Annotated[str, Meta(min_length=1, description="A diffusers folder or a hub id.")]
ServedModelName = Annotated[
    str, Meta(description="The name that requests use; empty: the last part of the model's folder or hub id.")
]
Device = Annotated[str, Meta(description='"cpu", "cuda", "cuda:1", …; "auto" takes a GPU if there is one.')]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Meta(description="Of weights and arithmetic; auto: float32 on a CPU, else bfloat16."),
]
MaxNumSeqs = Annotated[int, Meta(ge=1, le=COUNT_MAX, description="Requests in one denoise step; 1 turns batching off.")]
MaxResidents = Annotated[
    int, Meta(ge=0, le=COUNT_MAX, description="Requests on a worker, in any phase; 0: twice max_num_seqs.")
]
MaxSteps = Annotated[
    int, Meta(ge=1, le=COUNT_MAX, description="The largest num_inference_steps that a request may ask for.")
]
StepExecution = Annotated[
    bool, Meta(description="Run step by step; off: request mode, a call of the whole pipeline for a static batch.")
]
VaeTiling = Annotated[
    bool, Meta(description="Decode pictures in tiles: less memory for large ones, which come out slightly different.")
]
VaeSlicing = Annotated[
    bool, Meta(description="Decode a call's pictures one after another; step by step, they always are.")
]
Offload = Annotated[
    OffloadName,
    Meta(
        description="Keep weights in the CPU's memory until they are used: those of whole components (model) or of "
        "single layers (group)."
    ),
]
Compile = Annotated[
    bool, Meta(description="Compile the blocks that the denoiser repeats (torch.compile); the start takes longer.")
]
PromptCacheMib = Annotated[
    int,
    Meta(
        ge=0,
        le=COUNT_MAX,
        description="MiB of the device's memory for embeddings of prompts that may come again; 0: none are kept.",
    ),
]
MetricsHost = Annotated[str, Meta(description="Address that the metrics are served on.")]
MetricsPort = Annotated[int, Meta(ge=0, le=PORT_MAX, description="Port of the metrics; 0: none.")]
LogLevelSetting = Annotated[LogLevel, Meta(description="Least important log lines that are shown.")]
LogFormatSetting = Annotated[LogFormat, Meta(description="Log lines for people (console) or for programs (json).")]


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave scheduler`."""

    bind: Annotated[str, Meta(description="Address that gateways and workers connect to.")] = SCHEDULER_ADDRESS
    policy: Policy = "fifo"
    max_queue: MaxQueue = 1_000
    suspect_after_s: SuspectAfter = 2.0
    lost_after_s: LostAfter = 5.0
    max_attempts: MaxAttempts = 3
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = "auto"


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave gateway`."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    scheduler: Scheduler = SCHEDULER_ADDRESS
    data_bind: Annotated[str, Meta(description="Address that workers bring pictures to.")] = DATA_ADDRESS
    advertise: Annotated[
        str, Meta(description="The data address by the name that workers reach it by; empty: the bound one.")
    ] = ""
    name: Annotated[str, Meta(description="Name in logs and messages.")] = "gateway"
    max_body_bytes: MaxBodyBytes = 1024 * 1024
    request_timeout_s: RequestTimeout = 600.0
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = "auto"


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave worker`."""

    model: Model
    served_model_name: ServedModelName = ""
    scheduler: Scheduler = SCHEDULER_ADDRESS
    name: Annotated[str, Meta(description="Name in logs and messages.")] = "worker"
    device: Device = "auto"
    dtype: Dtype = "auto"
    vae_tiling: VaeTiling = False
    vae_slicing: VaeSlicing = False
    offload: Offload = "none"
    compile: Compile = False
    prompt_cache_mib: PromptCacheMib = 256
    max_num_seqs: MaxNumSeqs = 8
    max_residents: MaxResidents = 0
    max_num_inference_steps: MaxSteps = 200
    threads: Annotated[
        int, Meta(ge=0, le=COUNT_MAX, description="Torch threads; 0: as many as torch chooses, a thread for each core.")
    ] = 0
    step_execution: StepExecution = True
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = "auto"


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave serve`: those of the services that are not about how they find each other.

    A field that has a service's field's name is passed on to it, and has the same type and default.
    """

    model: Model
    served_model_name: ServedModelName = ""
    step_execution: StepExecution = True
    max_num_seqs: MaxNumSeqs = 8
    max_residents: MaxResidents = 0
    max_num_inference_steps: MaxSteps = 200
    workers: Annotated[
        int, Meta(ge=1, le=COUNT_MAX, description="Worker processes, each with its own copy of the model.")
    ] = 1
    host: Host = "127.0.0.1"
    port: Port = 8000
    policy: Policy = "fifo"
    max_queue: MaxQueue = 1_000
    max_attempts: MaxAttempts = 3
    suspect_after_s: SuspectAfter = 2.0
    lost_after_s: LostAfter = 5.0
    request_timeout_s: RequestTimeout = 600.0
    max_body_bytes: MaxBodyBytes = 1024 * 1024
    device: Device = "auto"
    dtype: Dtype = "auto"
    vae_tiling: VaeTiling = False
    vae_slicing: VaeSlicing = False
    offload: Offload = "none"
    compile: Compile = False
    prompt_cache_mib: PromptCacheMib = 256
    threads: Annotated[
        int,
        Meta(ge=0, le=COUNT_MAX, description="Torch threads of each worker; 0: the cores divided by the workers."),
    ] = 0
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=PORT_MAX,
            description="Port of the gateway's metrics; the scheduler's is the next, then the workers'; 0: none.",
        ),
    ] = 0
    log_level: LogLevelSetting = "info"
    log_format: LogFormatSetting = "auto"

    def metrics_ports(self) -> range:
        """Of the gateway, the scheduler and each worker, in this order; empty if there are to be none."""
        return range(self.metrics_port, self.metrics_port + 2 + self.workers) if self.metrics_port else range(0)


class Rule(NamedTuple):
    """What several fields of a record must be together."""

    fields: tuple[str, ...]
    text: str
    holds: Callable[[Any], bool]


_SILENCE = Rule(
    ("suspect_after_s", "lost_after_s"),
    f"suspect_after_s must be more than a heartbeat ({HEARTBEAT_S:g} s) and no more than lost_after_s",
    lambda config: HEARTBEAT_S < config.suspect_after_s <= config.lost_after_s,
)
_RESIDENTS = Rule(
    ("max_residents", "max_num_seqs"),
    "max_residents must be 0 or at least max_num_seqs",
    lambda config: config.max_residents == 0 or config.max_residents >= config.max_num_seqs,
)
_COMPILED_WHOLE = Rule(
    ("compile", "offload"),
    'compile and offload = "group" exclude each other: the hooks that move single layers stand between what would be '
    'compiled as one; offload = "model" leaves the denoiser whole',
    lambda config: not (config.compile and config.offload == "group"),
)
_METRICS_APART = Rule(
    ("port", "metrics_port"), "the HTTP API and the metrics need different ports", lambda c: c.port != c.metrics_port
)
_ALL_METRICS_APART = Rule(
    ("port", "metrics_port", "workers"),
    "port must not be among the metrics' ports, which are metrics_port, the next, and one more for each worker",
    lambda config: config.port not in config.metrics_ports(),
)
_ALL_METRICS_FIT = Rule(
    ("metrics_port", "workers"),
    f"the metrics' ports, which are metrics_port, the next, and one more for each worker, must end by {PORT_MAX}",
    lambda config: config.metrics_ports().stop <= PORT_MAX + 1,
)
RULES: dict[type[Struct], tuple[Rule, ...]] = {
    SchedulerConfig: (_SILENCE,),
    GatewayConfig: (_METRICS_APART,),
    WorkerConfig: (_RESIDENTS, _COMPILED_WHOLE),
    ServeConfig: (_SILENCE, _RESIDENTS, _COMPILED_WHOLE, _ALL_METRICS_APART, _ALL_METRICS_FIT),
}


def broken_rule(config: Struct) -> Rule | None:
    """The first rule that these settings break, each of which is right by itself."""
    return next((rule for rule in RULES[type(config)] if not rule.holds(config)), None)


def new_peer_id(name: str) -> str:
    """A routing id that no other process, and no earlier boot of this one, has."""
    return f"{name}-{secrets.token_hex(4)}"
