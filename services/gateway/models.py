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

    def served(self) -> list[ModelStatus]:
        """Those that have a worker."""
        return [status for status in self._models.values() if status.workers > 0]

    def ready(self) -> list[str]:
        """Names of the models that have a worker."""
        return [status.profile.model for status in self.served()]

    def first_seen(self, name: str) -> int:
        """When this gateway first heard of a present model, in Unix seconds."""
        return self._first_seen[name]

    def find(self, name: str | None) -> ModelStatus:
        """The model of that name; without a name the first. Raises a 404, or a 503 where it has no worker."""
        served = self.served()
        if name in self._models and self._models[name].workers == 0:
            raise _no_worker(f"no worker serves the model {name!r} at the moment")
        if not served:
            raise _no_worker(
                "no model is being served at the moment: no worker has joined yet, all have left, or the scheduler is "
                "not heard (GET /health/ready tells which)"
            )
        if name is None:
            return served[0]
        if name not in self._models:
            known = ", ".join(repr(status.profile.model) for status in served)
            asked = name if len(name) <= 128 else name[:128] + "…"
            raise ApiError(
                f"the model {asked!r} does not exist here; there is: {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._models[name]


def _no_worker(message: str) -> ApiError:
    return ApiError(message, status=503, type="server_error", code="no_worker", retry=True)


def default_size(profile: ModelProfile) -> str:
    """As the API writes sizes."""
    return f"{profile.default_width}x{profile.default_height}"
