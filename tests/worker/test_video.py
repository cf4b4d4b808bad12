"""Files of videos: what a browser plays, and everything needed to make the video again inside."""

import io
import os
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from common.params import OutputParams
from services.worker.pipelines.protocol import Video
from services.worker.video import encode_video, read_video_metadata
from tests.worker.driving import request


def gradient(shift: int) -> Image.Image:
    """48 by 32 pixels, smooth in each channel, another for each `shift`."""
    rows, columns = np.mgrid[0:32, 0:48]
    channels = (4 * columns + shift, 6 * rows, np.full_like(rows, 20 * shift))
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


FRAMES = [gradient(shift) for shift in range(9)]


def encoded(quality: int = 100, frames: list[Image.Image] = FRAMES, **changes: Any) -> bytes:
    values: dict[str, Any] = {"seed": 2**63 - 1, "num_frames": len(frames), "height": 32, "width": 48}
    asked = msgspec.structs.replace(request("r", **(values | changes)), output=OutputParams("mp4", quality))
    return encode_video(Video(frames, 16), asked)


def decoded(data: bytes) -> list[Image.Image]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def top_level_boxes(data: bytes) -> list[str]:
    """The names of an MP4's outermost boxes, in their order (ISO 14496-12, 4.2)."""
    names, at = [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8].decode())
        at += int.from_bytes(data[at : at + 4], "big")
    return names


def test_the_file_is_what_browsers_play() -> None:
    data = encoded()
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams
        codec = container.streams.video[0].codec_context
        assert (codec.name, codec.profile, codec.pix_fmt) == ("h264", "High", "yuv420p")
        assert (codec.width, codec.height, stream.average_rate, stream.frames) == (48, 32, 16, 9)


def test_the_file_can_be_played_while_it_arrives() -> None:
    boxes = top_level_boxes(encoded())
    assert boxes.index("moov") < boxes.index("mdat")


def test_the_frames_come_back_in_their_order_and_colours() -> None:
    found = decoded(encoded())
    assert len(found) == len(FRAMES)
    for frame, original in zip(found, FRAMES, strict=True):
        difference = np.abs(np.asarray(frame).astype(int) - np.asarray(original).astype(int))
        assert difference.mean() < 3


def test_one_frame_is_a_video_too() -> None:
    assert len(decoded(encoded(frames=FRAMES[:1]))) == 1


def test_hundreds_of_frames_fit_their_index() -> None:
    assert len(decoded(encoded(frames=FRAMES * 40))) == 360


def test_equal_frames_make_equal_bytes_however_many_processors_there_are() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (16, 4, 3), dtype=np.uint8)
    scene = np.asarray(Image.fromarray(noise).resize((32, 128)))
    scrolling = [Image.fromarray(np.roll(scene, 3 * index, axis=0)) for index in range(6)]
    first = encoded(frames=scrolling)
    available = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(available)})
        assert encoded(frames=scrolling) == first
    finally:
        os.sched_setaffinity(0, available)


def test_the_parameters_come_back_in_any_script() -> None:
    metadata = read_video_metadata(encoded(prompt="un café 🍎 à 東京", negative_prompt="暗い 👎🏽"))
    assert metadata == {
        "model": "demo",
        "prompt": "un café 🍎 à 東京",
        "negative_prompt": "暗い 👎🏽",
        "size": "48x32",
        "output_format": "mp4",
        "output_compression": 100,
        "num_inference_steps": 6,
        "num_frames": 9,
        "guidance_scale": 5.0,
        "seed": 2**63 - 1,
    }


def test_it_says_its_prompt_and_its_maker_in_texts_of_their_own() -> None:
    with av.open(io.BytesIO(encoded(prompt="苹果 🍏"))) as container:
        assert (container.metadata["prompt"], container.metadata["Software"]) == ("苹果 🍏", "Stepweave")


def test_the_longest_prompt_still_makes_a_file_and_is_whole() -> None:
    longest = "🍎" * 32_000
    data = encoded(prompt=longest, negative_prompt=longest)
    metadata = read_video_metadata(data)
    assert metadata["prompt"] == metadata["negative_prompt"] == longest
    assert len(decoded(data)) == 9


def test_a_lower_quality_makes_a_smaller_file() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    sizes = [len(encoded(quality, frames=[Image.fromarray(noise)] * 2)) for quality in (0, 50, 100)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_odd_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="even sides, these are 33x32"):
        encoded(frames=[Image.new("RGB", (33, 32))])


@pytest.mark.parametrize("data", [b"", b"no video", b"\0\0\0\x18ftypisom"], ids=["empty", "text", "cut-off"])
def test_what_is_no_video_holds_no_parameters(data: bytes) -> None:
    with pytest.raises(ValueError, match="no MP4 video"):
        read_video_metadata(data)


def test_a_video_of_somebody_else_holds_no_parameters() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_image(FRAMES[0])))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="no parameters"):
        read_video_metadata(buffer.getvalue())
