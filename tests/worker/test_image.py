"""Files: three formats, and everything needed to make the picture again inside."""

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from common.params import OutputFormat, OutputParams
from services.worker.image import encode_image, read_metadata
from tests.worker.driving import request

FORMATS: tuple[OutputFormat, ...] = ("png", "jpeg", "webp")
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))


def encoded(output_format: OutputFormat, quality: int = 100, **changes: Any) -> bytes:
    asked = msgspec.structs.replace(
        request("r", seed=2**63 - 1, **changes), output=OutputParams(output_format, quality)
    )
    return encode_image(PICTURE, asked)


@pytest.mark.parametrize("output_format", FORMATS)
def test_the_file_is_of_the_format_that_was_asked_for(output_format: OutputFormat) -> None:
    with Image.open(io.BytesIO(encoded(output_format))) as image:
        assert (image.format, image.size) == (output_format.upper(), (48, 32))


def test_a_png_has_every_pixel() -> None:
    with Image.open(io.BytesIO(encoded("png"))) as image:
        assert np.array_equal(np.asarray(image), np.asarray(PICTURE))


@pytest.mark.parametrize("output_format", FORMATS)
def test_the_parameters_come_back_in_any_script(output_format: OutputFormat) -> None:
    metadata = read_metadata(encoded(output_format, prompt="un café 🍎 à 東京", negative_prompt="暗い 👎🏽"))
    assert metadata == {
        "model": "demo",
        "prompt": "un café 🍎 à 東京",
        "negative_prompt": "暗い 👎🏽",
        "size": "32x32",
        "num_frames": 1,
        "output_format": output_format,
        **({} if output_format == "png" else {"output_compression": 100}),
        "num_inference_steps": 6,
        "guidance_scale": 5.0,
        "seed": 2**63 - 1,
    }


def test_a_png_says_its_prompt_and_its_maker_in_texts_of_their_own() -> None:
    with Image.open(io.BytesIO(encoded("png", prompt="苹果 🍏"))) as image:
        image.load()
        assert (image.info["prompt"], image.info["Software"]) == ("苹果 🍏", "Stepweave")


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_a_lower_quality_makes_a_smaller_file(output_format: OutputFormat) -> None:
    sizes = [len(encoded(output_format, quality)) for quality in (0, 50, 100)]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("output_format", FORMATS)
def test_the_longest_prompt_still_makes_a_file(output_format: OutputFormat) -> None:
    metadata = read_metadata(encoded(output_format, prompt="🍎" * 32_000, negative_prompt="no"))
    assert metadata["prompt"].startswith("🍎" * 7_000)
    assert metadata["seed"] == 2**63 - 1
    assert ("texts_cut" in metadata) == (output_format != "png")


def test_a_file_of_somebody_else_holds_no_parameters() -> None:
    buffer = io.BytesIO()
    PICTURE.save(buffer, format="JPEG")
    with pytest.raises(ValueError, match="no parameters"):
        read_metadata(buffer.getvalue())
