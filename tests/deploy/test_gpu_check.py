"""The check of a GPU, tried with tiny models on a CPU: it measures, and it finds what it is there to find."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace

from services.worker import prepare_environment

prepare_environment()

import torch  # noqa: E402 - after the environment that it reads
from diffusers import QwenImageTransformer2DModel, UNet2DConditionModel  # noqa: E402

from deploy.gpu_check import __main__ as gpu_check  # noqa: E402
from deploy.gpu_check.measure import Equality, equality, step_cost  # noqa: E402
from deploy.gpu_check.models import MODELS, QWEN_TRANSFORMER, SDXL_UNET, Subject  # noqa: E402
from services.worker.input_batch import StepInputBatch  # noqa: E402

CPU = torch.device("cpu")
SMALL = (64, 64)


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "configure_logging", lambda *_: None)
    torch.set_num_threads(1)


def checked(file: Path, expected_code: int = 0, **options: Any) -> dict[str, Any]:
    """The models' reports, by their names, of the command with tiny models."""
    with pytest.raises(typer.Exit) as end:
        gpu_check.main(device="cpu", tiny=True, json_file=file, **options)
    assert end.value.exit_code == expected_code
    return {model["name"]: model for model in json.loads(file.read_bytes())["models"]}


def test_it_times_steps_and_compares_what_requests_get_together_and_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = checked(tmp_path / "found.json")
    assert set(reports) == {"sdxl", "qwen-image"}
    for report in reports.values():
        assert [(cost["requests"], cost["rows"]) for cost in report["steps"]] == [(1, 2), (2, 4)]
        assert all(cost["step_ms"] > 0 and cost["decode_ms"] > 0 for cost in report["steps"])
        assert report["equality"]["rows"] > report["equality"]["requests"] > 1
    assert len(reports["qwen-image"]["equality"]["sizes"]) > 1
    said = capsys.readouterr().out
    assert "step ms" in said
    assert "FAULT" not in said


def test_in_half_precision_too_and_what_there_is_no_time_for_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = checked(tmp_path / "found.json", models="qwen-image", dtype="bfloat16", minutes=0)
    assert 0 < reports["qwen-image"]["equality"]["worst_rms"] < 0.06
    assert all("--minutes" in cost["note"] and cost["step_ms"] is None for cost in reports["qwen-image"]["steps"])
    assert "64x64, 2 requests: left out" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_no_model() -> None:
    with pytest.raises(typer.BadParameter, match="no model 'sd9'; there are sdxl, qwen-image"):
        gpu_check.main(models="sdxl,sd9", device="cpu")


@pytest.mark.parametrize(
    ("model", "config", "parameters"),
    [
        (UNet2DConditionModel, SDXL_UNET, 2_567_463_684),
        (QwenImageTransformer2DModel, QWEN_TRANSFORMER, 20_430_401_088),
    ],
)
def test_the_real_ones_have_the_published_number_of_parameters(
    model: Callable[..., Any], config: dict[str, Any], parameters: int
) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model(**config).parameters()) == parameters


def broken(name: str, spoil: Callable[[StepInputBatch, list[torch.Tensor]], list[torch.Tensor]]) -> Subject:
    """A tiny model whose predictions are spoilt."""
    subject = MODELS[name](CPU, torch.float32, True)
    pipeline: Any = subject.pipeline
    denoise_step = pipeline.denoise_step
    pipeline.denoise_step = lambda batch: spoil(batch, denoise_step(batch))
    return subject


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_are_mixed_up_are_found(name: str) -> None:
    def mixed_up(batch: StepInputBatch, predictions: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*predictions[1::-1], *predictions[2:]]

    with torch.inference_mode():
        found = equality(broken(name, mixed_up), (SMALL, SMALL), 3, torch.float32)
    assert found.worst_rms > 0.1
    assert ["prediction" in fault or "picture" in fault for fault in found.faults] == [True, True]


def test_a_group_that_does_not_fit_is_not_timed_in_halves() -> None:
    def small(batch: StepInputBatch, predictions: list[torch.Tensor]) -> list[torch.Tensor]:
        if batch.requests > 1:
            raise torch.OutOfMemoryError
        return predictions

    with torch.inference_mode():
        subject = broken("sdxl", small)
        cost = step_cost(subject, SMALL, 2, 0.01)
        assert (cost.step_ms, cost.note) == (None, "does not fit into the device's memory")
        alone = step_cost(subject, SMALL, 1, 0.01)
    assert alone.step_ms is not None


FINE = Equality(
    requests=3,
    rows=4,
    sizes=[SMALL],
    predictions=9,
    bound=0.06,
    worst_rms=0.06,
    worst_max=0.2,
    another_text=0.12,
    another_timestep=0.12,
    picture_bound=5.0,
    worst_picture_mean=5.0,
    worst_picture_max=90,
)


def test_at_its_bounds_all_is_well() -> None:
    assert FINE.faults == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worst_rms": 0.061}, "a prediction differs by 6.10%"),
        ({"worst_rms": float("nan")}, "a prediction differs by nan%"),
        ({"worst_picture_mean": 5.1}, "a picture differs by 5.10/255"),
        ({"another_text": 0.11}, "another's text differs by 11.00% only: a mix-up would not be seen"),
        ({"another_timestep": 0.11}, "another's timestep differs by 11.00% only"),
    ],
)
def test_beyond_them_it_says_what_is_wrong(changes: dict[str, float], words: str) -> None:
    (fault,) = replace(FINE, **changes).faults
    assert words in fault
