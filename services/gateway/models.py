"""The models that can be asked for, as the scheduler last told.

Role: holds the newest `ModelsUpdate` and finds a request's model in it. Judges no other field of a request.
"""

import time
from collections.abc import Callable

from common.config import RECONCILE_S
from common.messages import ModelProfile, ModelStatus
from services.gateway.errors import ApiError


class ModelTable:
    """Name to `ModelStatus`.

    A scheduler that has started again does not know at once which workers there are. So long as it waits for them
    (`RECONCILE_S`), a model that it does not speak of counts as it did before: its calls wait at the scheduler.
    """

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        on_new: Callable[[str], None] = lambda model: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._on_new = on_new  # told the name of each model that comes up
        self._told: dict[str, ModelStatus] = {}  # by this scheduler
        self._before: dict[str, ModelStatus] = {}  # what was known when the scheduler started again
        self._before_until = float("-inf")
        self._first_seen: dict[str, int] = {}  # Unix seconds, by name; of present models only

    def update(self, models: tuple[ModelStatus, ...]) -> None:
        """Replaces all that this scheduler has told."""
        now = int(self._wall_clock())
        self._told = {status.profile.model: status for status in models}
        models_now = self._models
        for name in models_now.keys() - self._first_seen.keys():
            self._on_new(name)
        self._first_seen = {name: self._first_seen.get(name, now) for name in models_now}

    def scheduler_restarted(self) -> None:
        """From now on another scheduler tells."""
        self._before, self._before_until = self._models, self._clock() + RECONCILE_S

    @property
    def _models(self) -> dict[str, ModelStatus]:
        return self._before | self._told if self._clock() < self._before_until else self._told

    def served(self) -> list[ModelStatus]:
        """Those that have a worker, by name: which is the first must not change with who says hello first."""
        return [status for _, status in sorted(self._models.items()) if status.workers > 0]

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
