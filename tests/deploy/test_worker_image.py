"""The worker's image, installed as its file says. It takes more than a gigabyte, which is gone afterwards."""

import shutil
from collections.abc import Iterator

import pytest

from tests.deploy import files
from tests.deploy.image import Image

WORKER = files.stages()["worker"]
LOADS = """
import torch, services.demo, services.worker.loader as loader
pipeline = loader.load_pipeline(str(services.demo.DEMO_CHECKPOINT), "cpu", "float32")
print(type(pipeline).__name__, torch.__version__)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("worker")
    yield Image(WORKER, folder)
    shutil.rmtree(folder)


def test_the_worker_image_loads_a_model_with_the_locks_torch(worker: Image) -> None:
    family, torch = worker.python("-c", LOADS).split()[-2:]
    assert family == "StableDiffusion3StepPipeline"
    assert f"torch=={torch.partition('+')[0]}" in (files.ROOT / "requirements.lock").read_text().split()
    assert "--no-step-execution" in worker.stepweave("worker", "--help")


def test_the_worker_images_torch_comes_from_the_index_that_is_chosen() -> None:
    torch, rest, code = files.pip_commands(WORKER)
    assert torch == ["install", "-c", "requirements.lock", "--no-deps", "--index-url", "$TORCH_INDEX", "torch"]
    assert rest == ["install", "-c", "requirements.lock", ".[worker]"]
    assert code == files.pip_commands(files.stages()["control"])[-1] == ["install", "--no-deps", "."]
