"""The models that can be asked for, as the scheduler last told.

Role: holds the newest `ModelsUpdate` and finds a request's model in it. Judges no other field of a request.
"""

import time
from collections.abc import Callable

from common.messages import ModelProfile, ModelStatus
from services.gateway.errors import ApiError


class ModelTable:
    """Name to `ModelStatus`, in the scheduler's order."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._models: dict[str, ModelStatus] = {}
        self._first_seen: dict[str, int] = {}  # Unix seconds, by name; of present models only

    def update(self, models: tuple[ModelStatus, ...]) -> None:
        """Replaces all that is known."""
        now = int(self._wall_clock())
        self._models = {status.profile.model: status for status in models}
        self._first_seen = {name: self._first_seen.get(name, now) for name in self._models}

    def all(self) -> list[ModelStatus]:
        return list(self._models.values())

    def ready(self) -> list[str]:
        """Names of the models that have a worker."""
        return [name for name, status in self._models.items() if status.workers > 0]

    def first_seen(self, name: str) -> int:
        """When this gateway first heard of a present model, in Unix seconds."""
        return self._first_seen[name]

    def find(self, name: str | None) -> ModelStatus:
        """The model of that name; without a name the first. Raises a 404 or, where there are none at all, a 503."""
        if not self._models:
            raise ApiError(
                "no model is being served at the moment: no worker has joined yet, all have left, or the scheduler is "
                "not heard (GET /health/ready tells which)",
                status=503,
                type="server_error",
                code="no_worker",
                retry=True,
            )
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            known = ", ".join(repr(other) for other in self._models)
            asked = name if len(name) <= 128 else name[:128] + "…"
            raise ApiError(
                f"the model {asked!r} does not exist here; there is: {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._models[name]


def default_size(profile: ModelProfile) -> str:
    """As the API writes sizes."""
    return f"{profile.default_width}x{profile.default_height}"
