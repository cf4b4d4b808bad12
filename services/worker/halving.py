"""Work on several requests whose failure is halved until the one at fault is alone.

Role: the one rule of both runners for a call that raises. It knows neither what the call does nor what a request is.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import structlog
import torch

from services.worker.streams import release_cached_memory

log = structlog.get_logger()

T = TypeVar("T")


def in_halves(
    states: list[Any], call: Callable[[list[Any]], T], on_fault: Callable[[Any, Exception], None], device: torch.device
) -> Iterator[tuple[list[Any], T]]:
    """Calls `call(states)` and yields `states` with its result. If it raises, both halves take the place of the whole,
    and so on; `on_fault` is told of each state that fails alone.

    Raises `torch.AcceleratorError`: the device itself is broken, and every later call on it will fail. The worker ends
    and is started again.
    """
    try:
        result = call(states)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # foreign code: whatever it raises must end one request, not all of them
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if len(states) == 1:
            on_fault(states[0], error)
        else:
            ids = [state.request_id for state in states]
            log.info("a group failed, halving it", requests=ids, out_of_memory=out_of_memory)
    else:
        yield states, result
        return
    if out_of_memory:
        # Only now: while the error was being handled, its traceback held the failed call's tensors.
        release_cached_memory(device)
    if len(states) > 1:
        middle = len(states) // 2
        yield from in_halves(states[:middle], call, on_fault, device)
        yield from in_halves(states[middle:], call, on_fault, device)
