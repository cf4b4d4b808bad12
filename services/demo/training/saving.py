"""Saved states: a stage of the training that was interrupted goes on from its last one."""

import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

SECONDS_BETWEEN_STATES = 120.0

_asked_to_stop = threading.Event()


def stop_after_saving_on_signals() -> None:
    """From now on SIGINT and SIGTERM end the training at the end of a step, with its state saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _asked_to_stop.set())


def stop_if_asked() -> None:
    """For work that has no state to save.

    Raises:
        KeyboardInterrupt: a signal asked to stop.
    """
    if _asked_to_stop.is_set():
        raise KeyboardInterrupt


def save_whole(value: Any, path: Path) -> None:
    """Saves ``value`` with torch so that a file at ``path`` is whole, whenever the program ends."""
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    partial.replace(path)


class SavedState:
    """The newest state of one stage, in one file that is replaced whole.

    ``parts`` are the objects with ``state_dict`` and ``load_state_dict`` that the stage changes.
    """

    def __init__(self, path: Path, **parts):
        self._path = path
        self._parts = parts
        self._last = time.monotonic()

    def load(self) -> int:
        """Puts the parts back as they were saved; returns how many steps were done then, 0 without a file."""
        if not self._path.is_file():
            return 0
        saved = torch.load(self._path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        return saved["step"]

    def save(self, step: int) -> None:
        """Saves the parts after ``step`` steps."""
        save_whole({"step": step} | {name: part.state_dict() for name, part in self._parts.items()}, self._path)
        self._last = time.monotonic()

    def save_now_and_then(self, step: int) -> None:
        """Saves when enough time has passed since the last time.

        Raises:
            KeyboardInterrupt: a signal asked to stop; the state is saved.
        """
        if _asked_to_stop.is_set():
            self.save(step)
            raise KeyboardInterrupt
        if time.monotonic() - self._last > SECONDS_BETWEEN_STATES:
            self.save(step)
