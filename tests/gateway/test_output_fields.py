"""Frames and files: a video is an mp4, a picture is none, and each is said where it is asked for otherwise."""

from typing import Any

import pytest

from common.messages import ModelProfile, SizeRule
from common.params import OutputParams
from services.gateway.errors import ApiError
from services.gateway.output_fields import num_frames, output_params
from tests.builders import profile

RULE = SizeRule(multiple=16, min_side=16, max_side=192, max_pixels=192 * 192, pixels_per_token=16, frames_per_token=4)
VIDEO = profile(model="film", size=RULE, accepts=("num_frames",), default_num_frames=9, max_num_frames=83)
PICTURE = profile()


def asked(body: dict[str, Any], of: ModelProfile) -> tuple[int, OutputParams]:
    frames = num_frames(body, of)
    return frames, output_params(body, of, frames)


@pytest.mark.parametrize(
    ("body", "of", "frames", "output"),
    [
        ({}, PICTURE, 1, OutputParams("png", 100)),
        ({"num_frames": 1}, PICTURE, 1, OutputParams("png", 100)),
        ({}, VIDEO, 9, OutputParams("mp4", 100)),
        ({"num_frames": 5.0}, VIDEO, 5, OutputParams("mp4", 100)),
        ({"num_frames": 81, "output_format": "mp4"}, VIDEO, 81, OutputParams("mp4", 100)),
        ({"output_compression": 40}, VIDEO, 9, OutputParams("mp4", 40)),
        ({"num_frames": 1}, VIDEO, 1, OutputParams("png", 100)),
        ({"num_frames": 1, "output_format": "webp"}, VIDEO, 1, OutputParams("webp", 100)),
    ],
)
def test_the_file_is_one_that_holds_what_was_asked_for(
    body: dict[str, Any], of: ModelProfile, frames: int, output: OutputParams
) -> None:
    assert asked(body, of) == (frames, output)


@pytest.mark.parametrize(
    ("body", "of", "param", "message"),
    [
        ({"num_frames": 5}, PICTURE, "num_frames", "demo draws single pictures; leave num_frames out"),
        ({"output_format": "mp4"}, PICTURE, "output_format", "one frame is a picture; demo draws pictures"),
        ({"num_frames": 1, "output_format": "mp4"}, VIDEO, "output_format", "one frame is a picture; ask for more"),
        ({"output_format": "png"}, VIDEO, "output_format", "a video of 9 frames; use output_format 'mp4'"),
        ({"num_frames": 0}, VIDEO, "num_frames", "from 1 to"),
        ({"num_frames": 2}, VIDEO, "num_frames", "1, 5, 9 and so on up to 81, not 2; the nearest is 1"),
        ({"num_frames": 8}, VIDEO, "num_frames", "not 8; the nearest is 9"),
        ({"num_frames": 82}, VIDEO, "num_frames", "not 82; the nearest is 81"),
        ({"num_frames": 85}, VIDEO, "num_frames", "not 85; the nearest is 81"),
        ({"num_frames": 2**40}, VIDEO, "num_frames", "from 1 to"),
        ({"output_compression": 101}, VIDEO, "output_compression", "from 0 to 100"),
    ],
)
def test_what_fits_not_together_is_refused_with_what_would(
    body: dict[str, Any], of: ModelProfile, param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        asked(body, of)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_model_whose_tokens_cover_one_frame_makes_any_number_of_them() -> None:
    of = profile(accepts=("num_frames",), max_num_frames=16)
    assert num_frames({"num_frames": 6}, of) == 6
    with pytest.raises(ApiError, match="from 1 to 16, not 17; the nearest is 16"):
        num_frames({"num_frames": 17}, of)
