"""Fixtures of the worker's tests: one torch thread, and models built and loaded once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker import prepare_environment

prepare_environment()

import torch  # noqa: E402 - after the environment that it reads

from services.demo import DEMO_CHECKPOINT  # noqa: E402
from services.worker.loader import load_pipeline  # noqa: E402
from services.worker.pipelines.protocol import StepPipeline  # noqa: E402
from tests.checkpoints import CHECKPOINTS  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo() -> StepPipeline:
    """The demo model, as it is served on a CPU."""
    return load_pipeline(str(DEMO_CHECKPOINT), "cpu", "float32")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by its name; each is built once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else CHECKPOINTS[name](root / name)

    return folder


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[[str], Path]) -> Callable[[str], StepPipeline]:
    """A tiny checkpoint, loaded; each is loaded once."""
    loaded: dict[str, StepPipeline] = {}

    def pipeline(name: str) -> StepPipeline:
        if name not in loaded:
            loaded[name] = load_pipeline(str(checkpoint(name)), "cpu", "float32")
        return loaded[name]

    return pipeline


@pytest.fixture(params=CHECKPOINTS)
def pipeline(request: pytest.FixtureRequest, tiny: Callable[[str], StepPipeline]) -> StepPipeline:
    """Every tiny checkpoint in turn."""
    return tiny(request.param)
