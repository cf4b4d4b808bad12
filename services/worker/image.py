"""A picture to a file, with all that is needed to make it again written inside.

Role: PNG, JPEG or WebP bytes. The metadata are those of the request; the file says who made it. PNG holds them in UTF-8
text chunks, JPEG and WebP in the EXIF user comment, where other tools look for them too. It knows no tensors.
"""

import io
import json
from typing import Any

import msgspec
from PIL import Image, PngImagePlugin

from common.params import DiffusionRequest

SOFTWARE = "Stepweave"
# EXIF tags (CIPA DC-008): where the directory is, what is in it, who wrote the file.
_EXIF_IFD, _USER_COMMENT, _SOFTWARE = 0x8769, 0x9286, 0x0131
_UNICODE = b"UNICODE\0"
# A JPEG segment holds 65,533 bytes; the rest of the EXIF block needs a little. In characters of two bytes.
_MAX_COMMENT_UNITS = 32_000


def describe_request(request: DiffusionRequest) -> dict[str, Any]:
    """A body for the images API that makes the same file again: all parameters but those that were not given."""
    params = request.params
    told = {name: value for name, value in msgspec.to_builtins(params).items() if value not in (None, (), [])}
    size = f"{told.pop('width')}x{told.pop('height')}"
    if params.scheduler is not None:
        told["scheduler"] = {"name": params.scheduler.name, "options": dict(params.scheduler.options)}
    output = request.output
    told["output_format"] = output.output_format
    if output.output_format != "png":
        told["output_compression"] = output.output_compression
    return {"model": request.model, **told, "size": size}


def encode_image(image: Image.Image, request: DiffusionRequest) -> bytes:
    """The file, in the format that the request asks for."""
    output = request.output
    metadata = describe_request(request)
    buffer = io.BytesIO()
    if output.output_format == "png":
        info = PngImagePlugin.PngInfo()
        info.add_itxt("Software", SOFTWARE)
        info.add_itxt("prompt", request.params.prompt)
        info.add_itxt("parameters", json.dumps(metadata, ensure_ascii=False))
        image.save(buffer, format="PNG", pnginfo=info)
    else:
        image.convert("RGB").save(
            buffer,
            format=output.output_format.upper(),
            quality=max(1, output.output_compression),  # 0 is not a quality to every encoder
            exif=_exif(metadata),
        )
    return buffer.getvalue()


def read_metadata(data: bytes) -> dict[str, Any]:
    """The parameters inside a file that `encode_image` wrote. Raises `ValueError` if there are none."""
    with Image.open(io.BytesIO(data)) as image:
        if image.format == "PNG":
            image.load()  # text chunks may stand after the pixels
            text = str(image.info.get("parameters", ""))
        else:
            comment = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT, b"")
            text = comment[len(_UNICODE) :].decode("utf-16-be") if comment.startswith(_UNICODE) else ""
    found = json.loads(text) if text else None
    if not isinstance(found, dict):
        raise ValueError("the file holds no parameters")
    return found


def _exif(metadata: dict[str, Any]) -> Image.Exif:
    exif = Image.Exif()
    exif[_SOFTWARE] = SOFTWARE
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = _UNICODE + _fitting_json(metadata).encode("utf-16-be")
    return exif


def _fitting_json(metadata: dict[str, Any]) -> str:
    """JSON that an EXIF block can hold; texts that are too long for it are cut, and the JSON says so."""
    text = json.dumps(metadata, ensure_ascii=False)
    keep = _MAX_COMMENT_UNITS
    while len(text.encode("utf-16-be")) > 2 * _MAX_COMMENT_UNITS:
        keep //= 2
        cut = {name: value[:keep] if isinstance(value, str) else value for name, value in metadata.items()}
        text = json.dumps({**cut, "texts_cut": True}, ensure_ascii=False)
    return text
