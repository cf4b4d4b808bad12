"""A video to an MP4 file, with all that is needed to make it again written inside.

Role: H.264 in MP4, as every browser plays it. The metadata are those of a picture's file, by the names that a PNG has
them under. It knows no tensors.
"""

import io
import json
from typing import Any

import av
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image

from common.params import DiffusionRequest
from services.worker.image import SOFTWARE, describe_request
from services.worker.pipelines.protocol import Video

# Constant rate factors of x264. 0 is lossless, in a profile that browsers don't play; 51 is the worst.
_BEST_CRF, _WORST_CRF = 16, 51
# Bytes that a file's index takes at most, beside the metadata in it.
_INDEX_BYTES, _INDEX_BYTES_PER_FRAME = 4096, 64


def encode_video(video: Video, request: DiffusionRequest) -> bytes:
    """The file. `output_compression` 80 is x264's own default quality; 100 can hardly be told from the frames.

    Equal frames make equal bytes: x264 divides its work by the number of its threads, so it gets one.
    Raises `ValueError` for odd sides: colours are stored for squares of two by two pixels.
    """
    width, height = video.frames[0].size
    if width % 2 or height % 2:
        raise ValueError(f"an MP4 video needs even sides, these are {width}x{height}")
    texts = _texts(request)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", options=_muxer_options(texts, len(video.frames))) as container:
        container.metadata.update(texts)
        stream = container.add_stream("libx264", video.frames_per_second, {"crf": str(_crf(request))})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        # Players that are not told guess the colours by the size of the picture.
        stream.codec_context.colorspace = Colorspace.ITU709
        stream.codec_context.color_range = ColorRange.MPEG
        stream.codec_context.color_primaries = ColorPrimaries.BT709
        stream.codec_context.color_trc = ColorTrc.BT709
        for frame in video.frames:
            container.mux(stream.encode(_in_yuv(frame)))
        container.mux(stream.encode(None))  # what it still holds back
    return buffer.getvalue()


def read_video_metadata(data: bytes) -> dict[str, Any]:
    """The parameters inside a file that `encode_video` wrote. Raises `ValueError` if there are none."""
    try:
        with av.open(io.BytesIO(data), format="mp4") as container:
            text = container.metadata.get("parameters", "")
    except av.FFmpegError as error:
        raise ValueError(f"the file is no MP4 video: {error}") from error
    found = json.loads(text) if text else None
    if not isinstance(found, dict):
        raise ValueError("the file holds no parameters")
    return found


def _texts(request: DiffusionRequest) -> dict[str, str]:
    parameters = json.dumps(describe_request(request), ensure_ascii=False)
    return {"Software": SOFTWARE, "prompt": request.params.prompt, "parameters": parameters}


def _muxer_options(texts: dict[str, str], frames: int) -> dict[str, str]:
    """Texts by any name, and room for the index at the file's start, so that it plays while it arrives."""
    room = _INDEX_BYTES + _INDEX_BYTES_PER_FRAME * frames + sum(len(text.encode()) for text in texts.values())
    return {"movflags": "use_metadata_tags", "moov_size": str(room)}


def _crf(request: DiffusionRequest) -> int:
    return _WORST_CRF - round((_WORST_CRF - _BEST_CRF) * request.output.output_compression / 100)


def _in_yuv(frame: Image.Image) -> av.VideoFrame:
    rgb: av.VideoFrame = av.VideoFrame.from_image(frame.convert("RGB"))
    return rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG, threads=1)
