"""Bodies that are to be refused: what is wrong, the status, the field at fault, and a fragment of the message."""

from typing import Any, NamedTuple


class Bad(NamedTuple):
    name: str
    body: Any  # bytes: sent as they are; else as JSON, with `prompt` where it has none
    status: int
    param: str | None
    fragment: str


def _field(name: str, value: Any, fragment: str, *, param: str | None = None, status: int = 400) -> Bad:
    shown = repr(value)
    return Bad(f"{name}={shown[:24]}", {"prompt": "red apple", name: value}, status, param or name, fragment)


BAD_BODIES = [
    # The body as a whole
    Bad("empty", b"", 400, None, "not valid JSON"),
    Bad("no JSON", b"prompt=red", 400, None, "not valid JSON"),
    Bad("cut short", b'{"prompt": "red', 400, None, "not valid JSON"),
    Bad("no UTF-8", b'{"prompt": "\xff\xfe"}', 400, None, "not valid JSON"),
    Bad("array", b"[]", 400, None, "must be a JSON object"),
    Bad("null", b"null", 400, None, "must be a JSON object"),
    Bad("string", b'"red apple"', 400, None, "must be a JSON object"),
    Bad("too deep", b"[" * 100_000, 400, None, "nested too deeply"),
    Bad("too deep inside", b'{"prompt": ' + b'{"a":' * 50_000, 400, None, "nested too deeply"),
    Bad("integer of 5,000 digits", b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}", 400, None, "not valid JSON"),
    # prompt
    Bad("no prompt", {}, 400, "prompt", "prompt is required"),
    Bad("prompt null", {"prompt": None}, 400, "prompt", "prompt is required"),
    Bad("prompt empty", {"prompt": ""}, 400, "prompt", "prompt is required"),
    Bad("prompt blank", {"prompt": " \n\t\u3000"}, 400, "prompt", "prompt is required"),
    Bad("prompt too long", {"prompt": "a" * 32_001}, 400, "prompt", "32,000 is the most"),
    Bad("prompt a number", {"prompt": 7}, 400, "prompt", "must be a string, not 7"),
    Bad("prompt an array", {"prompt": ["a"]}, 400, "prompt", "must be a string, not an array"),
    Bad("half a surrogate pair", b'{"prompt": "apple \\ud83c"}', 400, "prompt", "not valid Unicode"),
    _field("negative_prompt", "a" * 32_001, "32,000 is the most"),
    _field("negative_prompt", True, "must be a string, not true"),
    # model
    _field("model", "nope", "the model 'nope' does not exist here; there is: 'demo'", status=404),
    _field("model", "", "does not exist here", status=404),
    _field("model", 3, "must be a string"),
    # n
    _field("n", 0, "from 1 to 10, not 0"),
    _field("n", 11, "from 1 to 10, not 11"),
    _field("n", -1, "from 1 to 10"),
    _field("n", "3", "must be an integer, not the string '3'"),
    _field("n", True, "must be an integer, not true"),
    _field("n", 1.5, "must be an integer, not 1.5"),
    _field("n", 10**30, "from 1 to 10"),
    _field("n", {}, "not an object"),
    # size
    _field("size", "64", "'WIDTHxHEIGHT' such as '64x64'"),
    _field("size", "big", "'WIDTHxHEIGHT' such as '64x64'"),
    _field("size", "64x64x64", "'WIDTHxHEIGHT'"),
    _field("size", "", "'WIDTHxHEIGHT'"),
    _field("size", 64, "'WIDTHxHEIGHT'"),
    _field("size", [64, 64], "'WIDTHxHEIGHT'"),
    _field("size", "0x0", "nearest legal size is '16x16'"),
    _field("size", "-64x64", "nearest legal size is '16x64'"),
    _field("size", "100x64", "multiples of 8; the nearest legal size is '104x64'"),
    _field("size", "8x64", "at least 16 pixels; the nearest legal size is '16x64'"),
    _field("size", "200x64", "at most 192 pixels; the nearest legal size is '192x64'"),
    _field("size", "99999999999999999999x1", "the nearest legal size is '192x16'"),
    # steps, guidance, seed
    _field("num_inference_steps", 0, "from 1 to 200"),
    _field("num_inference_steps", 201, "from 1 to 200"),
    _field("num_inference_steps", "20", "must be an integer"),
    _field("num_inference_steps", False, "must be an integer, not false"),
    Bad("steps infinite", b'{"prompt": "a", "num_inference_steps": Infinity}', 400, "num_inference_steps", "integer"),
    Bad("guidance NaN", b'{"prompt": "a", "guidance_scale": NaN}', 400, "guidance_scale", "finite number"),
    Bad("guidance Infinity", b'{"prompt": "a", "guidance_scale": Infinity}', 400, "guidance_scale", "finite number"),
    Bad("guidance -Infinity", b'{"prompt": "a", "guidance_scale": -Infinity}', 400, "guidance_scale", "finite"),
    Bad("guidance 1e999", b'{"prompt": "a", "guidance_scale": 1e999}', 400, "guidance_scale", "finite number"),
    _field("guidance_scale", -0.5, "from 0 to 100"),
    _field("guidance_scale", 100.1, "from 0 to 100"),
    _field("guidance_scale", 10**400, "from 0 to 100"),
    _field("guidance_scale", "4", "must be a number"),
    _field("guidance_scale", True, "must be a number, not true"),
    _field("scheduler", "DDIMScheduler", "demo has no choice of scheduler"),
    _field("sigmas", [1.0, 0.5], "demo has no choice of sigmas"),
    _field("timesteps", [999, 500], "demo has no choice of timesteps"),
    _field("true_cfg_scale", 4, "demo has no true_cfg_scale"),
    _field("true_cfg_scale", "4", "must be a number"),
    _field("max_sequence_length", 20, "no choice of max_sequence_length"),
    _field("seed", -1, "from 0 to"),
    _field("seed", 2**63, "from 0 to 9223372036854775807"),
    _field("seed", "7", "must be an integer"),
    _field("seed", 0.5, "must be an integer"),
    Bad("seeds run over", {"prompt": "a", "seed": 2**63 - 1, "n": 2}, 400, "seed", "count up from seed"),
    # output
    _field("response_format", "url", "use response_format 'b64_json'"),
    _field("response_format", "jpg", "b64_json or url"),
    _field("output_format", "gif", "png, jpeg, webp or mp4, not 'gif'"),
    _field("output_format", 1, "png, jpeg, webp or mp4, not 1"),
    _field("output_format", "mp4", "mp4 is for videos, and one frame is a picture; demo draws pictures"),
    _field("num_frames", 5, "demo draws single pictures"),
    _field("num_frames", 0, "num_frames must be from 1"),
    _field("num_frames", "5", "must be an integer"),
    _field("output_compression", 80, "png is lossless"),
    _field("output_compression", 101, "from 0 to 100"),
    _field("output_compression", -1, "from 0 to 100"),
    _field("output_compression", "80", "must be an integer"),
    # OpenAI's others
    _field("stream", True, "not offered yet"),
    _field("stream", "false", "must be true or false"),
    _field("partial_images", 2, "not offered yet"),
    _field("partial_images", 4, "from 0 to 3"),
    _field("background", "transparent", "opaque pictures only"),
    _field("background", "red", "auto, opaque or transparent"),
    _field("quality", "ultra", "quality must be auto"),
    _field("quality", 1, "quality must be auto"),
    _field("style", "dull", "vivid or natural"),
    _field("moderation", "none", "auto or low"),
    _field("user", 5, "must be a string"),
    _field("lora", {"name": "pixel"}, "takes no LoRA adapters"),
    _field("lora", [], "takes no LoRA adapters"),
    # Unknown fields
    _field("guidence_scale", 4, "did you mean 'guidance_scale'?"),
    _field("num_inference_step", 4, "did you mean 'num_inference_steps'?"),
    _field("negativeprompt", "a", "did you mean 'negative_prompt'?"),
    _field("width", 64, "did you mean 'size'?"),
    _field("steps", 4, "did you mean 'num_inference_steps'?"),
    _field("sampler", "DDIM", "did you mean 'scheduler'?"),
    _field("frames", 4, "did you mean 'num_frames'?"),
    _field("zzzzz", 4, "known are: prompt, model"),
    _field("unknown", None, "known are: prompt, model"),
]
