"""What the gateway knows of models while the scheduler starts again."""

import pytest

from common.config import RECONCILE_S
from common.messages import ModelStatus
from services.gateway.errors import ApiError
from services.gateway.models import ModelTable
from tests.builders import profile


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def status(model: str, workers: int = 1) -> ModelStatus:
    return ModelStatus(profile=profile(model=model), workers=workers)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def models(clock: Clock) -> ModelTable:
    table = ModelTable(clock=clock)
    table.update((status("b-model"), status("a-model")))
    return table


def test_the_default_is_the_first_by_name_whoever_said_hello_first(models: ModelTable) -> None:
    assert models.find(None).profile.model == "a-model"
    models.update((status("a-model"), status("b-model")))
    assert models.ready() == ["a-model", "b-model"]


def test_a_model_that_a_new_scheduler_has_not_heard_of_yet_is_still_served(models: ModelTable, clock: Clock) -> None:
    models.scheduler_restarted()
    models.update(())
    assert models.ready() == ["a-model", "b-model"]
    models.update((status("b-model", workers=2),))
    assert models.find("a-model").profile.model == "a-model"
    assert models.find("b-model").workers == 2
    assert models.find(None).profile.model == "a-model"
    assert models.first_seen("a-model") > 0
    clock.now = RECONCILE_S
    with pytest.raises(ApiError) as refused:
        models.find("a-model")
    assert refused.value.code == "model_not_found"
    assert models.ready() == ["b-model"]


def test_a_model_that_the_new_scheduler_says_has_no_worker_has_none(models: ModelTable) -> None:
    models.scheduler_restarted()
    models.update((status("a-model", workers=0),))
    with pytest.raises(ApiError) as refused:
        models.find("a-model")
    assert refused.value.code == "no_worker"
