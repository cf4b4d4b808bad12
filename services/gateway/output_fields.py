"""What comes out of a call: how many frames, and the kind of file that they are written to.

Role: `num_frames`, `output_format` and `output_compression`, judged against the model's profile. A request of one frame
is a picture, one of more a video: each has file formats of its own.
"""

from typing import cast

from common.messages import ModelProfile
from common.params import OutputFormat, OutputParams
from services.gateway.errors import invalid
from services.gateway.fields import Body, choice, integer

_PICTURE_FORMATS = ("png", "jpeg", "webp")
_FORMATS = (*_PICTURE_FORMATS, "mp4")
_MAX_FRAMES = 2**31  # a bound for the integer alone: what the model can make is judged after it


def num_frames(body: Body, profile: ModelProfile) -> int:
    """1 for a picture, more for a video."""
    asked = integer(body, "num_frames", 1, _MAX_FRAMES)
    if asked is None:
        return profile.default_num_frames
    if "num_frames" not in profile.accepts:
        if asked != 1:
            raise invalid("num_frames", f"{profile.model} draws single pictures; leave num_frames out")
        return asked
    step = profile.size.frames_per_token
    last = 1 + (profile.max_num_frames - 1) // step * step
    nearest = min(1 + round((asked - 1) / step) * step, last)
    if asked != nearest:
        legal = f"from 1 to {last}" if step == 1 else f"1, {1 + step}, {1 + 2 * step} and so on up to {last}"
        raise invalid("num_frames", f"num_frames must be {legal}, not {asked}; the nearest is {nearest}")
    return asked


def output_params(body: Body, profile: ModelProfile, frames: int) -> OutputParams:
    """The file of a picture or a video of `frames` frames."""
    asked = choice(body, "output_format", _FORMATS)
    output_format = asked or ("png" if frames == 1 else "mp4")
    if frames == 1 and output_format == "mp4":
        remedy = "ask for more num_frames" if "num_frames" in profile.accepts else f"{profile.model} draws pictures"
        raise invalid("output_format", f"mp4 is for videos, and one frame is a picture; {remedy}")
    if frames > 1 and output_format != "mp4":
        raise invalid(
            "output_format",
            f"{output_format} is for pictures, and this is a video of {frames} frames; use output_format 'mp4', "
            "or num_frames 1 for a picture",
        )
    compression = integer(body, "output_compression", 0, 100)
    if output_format == "png" and compression not in (None, 100):
        raise invalid(
            "output_compression",
            "png is lossless and has no output_compression; leave it out, or use output_format 'jpeg' or 'webp'",
        )
    return OutputParams(cast(OutputFormat, output_format), 100 if compression is None else compression)
