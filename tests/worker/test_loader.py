"""From a folder to a pipeline, and plain words where there is no way."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.loader import load_pipeline, resolve_device, resolve_dtype
from services.worker.pipelines.protocol import StepPipeline
from services.worker.pipelines.stable_diffusion import StableDiffusionStepPipeline
from tests.checkpoints.parts import CLIP_TOKENS
from tests.worker.driving import prepared, request


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint that a test may spoil."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_diffusers_and_transformers_log_goes_out_with_all_other_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_pipeline(str(tmp_path))
    for library in ("diffusers", "transformers"):
        logger = logging.getLogger(library)
        assert logger.propagate
        assert not [each for each in logger.handlers if type(each) is logging.StreamHandler], "lines of another form"
        assert logger.level == logging.ERROR, "they warn of cut-off prompts, and quote them"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load_pipeline(str(tmp_path / "nothing"))


def test_a_folder_that_is_no_diffusers_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no model_index\.json"):
        load_pipeline(str(tmp_path))


def test_a_name_that_is_neither_folder_nor_hub_id() -> None:
    with pytest.raises(ConfigError, match="no hub id"):
        load_pipeline("nothing")


def test_a_class_that_is_not_supported_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "AuraFlowPipeline"}))
    with pytest.raises(ConfigError, match=r"AuraFlowPipeline.*StableDiffusionPipeline, .*Pipeline; --no-step"):
        load_pipeline(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_index_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ConfigError, match="can't be read"):
        load_pipeline(str(tmp_path))


def test_a_checkpoint_without_its_weights(copied: Callable[[str], Path]) -> None:
    folder = copied("sd1")
    next((folder / "unet").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="can't load"):
        load_pipeline(str(folder), "cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"time_cond_proj_dim": 32}, "time_cond_proj_dim"), ({"in_channels": 9}, "inpainting")],
)
def test_a_unet_that_wants_more_than_a_prompt_is_refused(
    tiny: Callable[[str], StepPipeline], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    inner: Any = tiny("sd1")
    pipe = inner._pipe
    monkeypatch.setattr(pipe.unet, "_internal_dict", type(pipe.unet.config)(dict(pipe.unet.config) | changes))
    with pytest.raises(ConfigError, match=reason):
        StableDiffusionStepPipeline(pipe, inner.device, inner._defaults)


def test_sd3_loads_without_its_third_text_encoder_and_with_it(tiny: Callable[[str], StepPipeline]) -> None:
    without: Any = tiny("sd3")
    with_t5: Any = tiny("sd3-t5")
    assert without._pipe.text_encoder_3 is None
    assert with_t5._pipe.text_encoder_3 is not None


def test_defaults_are_those_of_the_diffusers_call(tiny: Callable[[str], StepPipeline]) -> None:
    sd1, sd3 = tiny("sd1").profile("a", 200), tiny("sd3").profile("b", 200)
    assert (sd1.default_num_inference_steps, sd1.default_guidance_scale) == (50, 7.5)
    assert (sd3.default_num_inference_steps, sd3.default_guidance_scale) == (28, 7.0)
    assert (sd1.model, sd1.pipeline, sd1.default_width) == ("a", "StableDiffusionPipeline", 32)
    assert (sd3.size.multiple, sd3.size.max_side, sd3.size.pixels_per_token) == (4, 64, 4)


def test_a_serving_defaults_file_changes_them(copied: Callable[[str], Path]) -> None:
    folder = copied("sd3")
    (folder / "stepweave.json").write_text(
        '{"default_num_inference_steps": 9, "default_guidance_scale": 0.0, "max_side": 41}'
    )
    profile = load_pipeline(str(folder), "cpu").profile("x", 200)
    assert (profile.default_num_inference_steps, profile.default_guidance_scale) == (9, 0.0)
    assert (profile.size.max_side, profile.default_height) == (40, 32)


def test_a_serving_defaults_file_sets_the_length_of_the_text(copied: Callable[[str], Path]) -> None:
    folder = copied("sd3")
    (folder / "stepweave.json").write_text('{"default_max_sequence_length": 7}')
    with torch.inference_mode():
        state = prepared(load_pipeline(str(folder), "cpu"), request("r"))
    assert state.cond.prompt_embeds.shape[1] == CLIP_TOKENS + 7


def test_default_steps_do_not_pass_the_workers_limit(tiny: Callable[[str], StepPipeline]) -> None:
    assert tiny("sd1").profile("a", 10).default_num_inference_steps == 10


def test_an_unknown_key_in_the_serving_defaults_stops_the_start(copied: Callable[[str], Path]) -> None:
    folder = copied("sd3")
    (folder / "stepweave.json").write_text('{"default_steps": 9}')
    with pytest.raises(ConfigError, match=r"default_steps.*known settings are: default_num_inference_steps"):
        load_pipeline(str(folder), "cpu")


def test_devices_and_dtypes_by_name() -> None:
    cpu = resolve_device("cpu")
    assert resolve_dtype("auto", cpu) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("float16", cpu) is torch.float16
    with pytest.raises(ConfigError, match="no device"):
        resolve_device("toaster")
    with pytest.raises(ConfigError, match="there is no cuda:63"):
        resolve_device("cuda:63")
    with pytest.raises(ConfigError, match="no dtype"):
        resolve_dtype("int8", cpu)
