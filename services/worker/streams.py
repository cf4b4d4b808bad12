"""Devices and streams: what differs between CUDA and the CPU, in one place.

Role: a stream of one's own for a thread, and handing tensors from one stream to another. On a CPU all of it is nothing.
It knows no requests.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch

Event = torch.cuda.Event


@contextlib.contextmanager
def torch_thread(device: torch.device, threads: int) -> Iterator[None]:
    """For the whole life of a thread that runs torch: no autograd, its own stream, its number of CPU threads (0: as
    torch likes)."""
    if threads > 0:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                yield
        else:
            yield


def mark(device: torch.device) -> Event | None:
    """The point that the current stream has reached."""
    if device.type != "cuda":
        return None
    event = Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def take_over(event: Event | None, tensors: Iterable[torch.Tensor]) -> None:
    """Lets the current stream use tensors that another stream made before `event`, without stopping the CPU."""
    if event is None:
        return
    for tensor in tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Gives memory that torch only keeps in reserve back to the device, after it ran out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
