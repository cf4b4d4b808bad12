"""What each process is told at its door, as frozen records.

Role: the settings of the three services with their defaults. They are read once, by the command line; below the door,
functions get the values that they need.
"""

import secrets

from msgspec import Struct

SCHEDULER_ADDRESS = "tcp://127.0.0.1:5570"
DATA_ADDRESS = "tcp://127.0.0.1:5571"

HEARTBEAT_S = 0.5  # how often workers and gateways beat, and the scheduler looks


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave scheduler`."""

    bind: str = SCHEDULER_ADDRESS
    policy: str = "fifo"
    max_queue: int = 1_000  # requests waiting, over all models
    suspect_after_s: float = 2.0  # silence after which a worker gets nothing new
    lost_after_s: float = 5.0  # silence after which its work is dispatched again
    max_attempts: int = 3  # dispatches of one request before it is given up


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave gateway`."""

    host: str = "127.0.0.1"
    port: int = 8000
    scheduler: str = SCHEDULER_ADDRESS
    data_bind: str = DATA_ADDRESS
    advertise: str = ""  # the data address that workers connect to; empty: the bound one
    name: str = "gateway"
    max_body_bytes: int = 1024 * 1024
    request_timeout_s: float = 600.0  # an accepted request that has not ended by then is aborted with an error


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """Settings of `stepweave worker`."""

    model: str  # a folder or a hub id
    served_model_name: str = ""  # the name that requests use; empty: the last part of `model`
    scheduler: str = SCHEDULER_ADDRESS
    name: str = "worker"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", …
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"
    max_num_seqs: int = 8
    max_residents: int = 0  # 0: twice max_num_seqs
    max_num_inference_steps: int = 200
    threads: int = 0  # torch threads of the step; 0: as many as there are cores
    step_execution: bool = True


def new_peer_id(name: str) -> str:
    """A routing id that no other process, and no earlier boot of this one, has."""
    return f"{name}-{secrets.token_hex(4)}"
