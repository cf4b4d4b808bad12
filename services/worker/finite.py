"""Are the latents still numbers? Asked of every request after every solver step, without making the device wait.

Role: on a CPU the answer is read at once. On CUDA it is copied to pinned memory and read after the next group has been
launched, so that the device is never idle for it. It knows states, and nothing of what becomes of them.
"""

from collections.abc import Sequence

import torch

from services.worker.state import DiffusionRequestState
from services.worker.streams import Event, mark


class FiniteWatch:
    """Flags under way. Used by the step thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[Sequence[DiffusionRequestState], torch.Tensor, Event | None] | None = None

    def check(
        self, states: Sequence[DiffusionRequestState], latents: Sequence[torch.Tensor]
    ) -> list[DiffusionRequestState]:
        """Asks about new latents. Returns those known by now to have failed: of this call on a CPU, of the one before
        on CUDA."""
        flags = torch.stack([torch.isfinite(tensor).all() for tensor in latents])
        if self._device.type != "cuda":
            return _failed(states, flags)
        host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = mark(self._device)
        earlier = self.settle()
        self._pending = (states, host, event)
        return earlier

    def settle(self) -> list[DiffusionRequestState]:
        """Waits for the flags that are under way, if any, and returns the states that failed."""
        if self._pending is None:
            return []
        states, host, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        return _failed(states, host)


def _failed(states: Sequence[DiffusionRequestState], flags: torch.Tensor) -> list[DiffusionRequestState]:
    return [state for state, finite in zip(states, flags.tolist(), strict=True) if not finite]
