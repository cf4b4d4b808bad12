"""``python -m bench.contact_sheet``: asks a running server for many pictures at once and lays them out as one."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Annotated

import typer
from openai import AsyncOpenAI
from PIL import Image, ImageDraw, ImageFont

from bench.options import server_address
from services.demo.training.progress import steps

SEED = 7
# What people ask a demo for first; then things in colours that the model was never shown together; then other shapes.
SQUARE = [
    "red apple",
    "pizza",
    "banana",
    "strawberry",
    "hamburger",
    "birthday cake",
    "cat face",
    "frog",
    "penguin",
    "octopus",
    "butterfly",
    "snail",
    "sunflower",
    "palm tree",
    "cactus",
    "rose",
    "house",
    "castle",
    "rocket",
    "bicycle",
    "automobile",
    "sailboat",
    "guitar",
    "soccer ball",
    "crown",
    "umbrella",
    "balloon",
    "key",
    "camera",
    "light bulb",
    "grinning face",
    "crying face",
    "smiling face with sunglasses",
    "robot",
    "ghost",
    "rainbow",
    "blue apple",
    "purple frog",
    "green automobile",
    "pink umbrella",
    "black balloon",
    "orange whale",
    "red key",
    "blue banana",
    "yellow rose",
    "green fox",
    "pink cactus",
    "purple guitar",
]
OTHER_SIZES = {
    "96x64": ("automobile", "sailboat", "crocodile", "green bell"),
    "64x96": ("giraffe", "rocket", "palm tree", "purple frog"),
    "48x48": ("red apple", "frog", "star", "cat face"),
    "96x96": ("owl", "rose", "castle", "blue crab"),
    "128x128": ("frog", "pizza"),
    "128x64": ("butterfly", "bicycle"),
}
CELL, LABEL, COLUMNS = 152, 14, 8


def main(
    output: Annotated[Path, typer.Argument(help="The picture to write.")],
    url: Annotated[
        str, typer.Option(help="Address of a running gateway.", callback=server_address)
    ] = "http://127.0.0.1:8000",
) -> None:
    """Draw the contact sheet: every prompt once, one seed, the server's defaults, nothing left out."""
    wanted = [(prompt, "64x64") for prompt in SQUARE]
    wanted += [(prompt, size) for size, prompts in OTHER_SIZES.items() for prompt in prompts]
    pictures = asyncio.run(_ask(url, wanted))
    rows = -(-len(wanted) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * CELL, rows * (CELL + LABEL)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, ((prompt, size), picture) in enumerate(zip(wanted, pictures, strict=True)):
        left, top = number % COLUMNS * CELL, number // COLUMNS * (CELL + LABEL)
        # Squares at twice their size, so that all cells are about as full.
        shown = picture.resize((128, 128), Image.Resampling.LANCZOS) if size == "64x64" else picture
        sheet.paste(shown, (left + (CELL - shown.width) // 2, top + (CELL - shown.height) // 2))
        label = prompt if size == "64x64" else f"{prompt} {size}"
        pen.text((left + CELL / 2, top + CELL), label, fill="black", font=font, anchor="mt")
    sheet.save(output, optimize=True)


async def _ask(url: str, wanted: list[tuple[str, str]]) -> list[Image.Image]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        tasks = [asyncio.ensure_future(_ask_one(client, prompt, size)) for prompt, size in wanted]
        for number in steps("drawing", 0, len(tasks)):
            await tasks[number]
        return [task.result() for task in tasks]


async def _ask_one(client: AsyncOpenAI, prompt: str, size: str) -> Image.Image:
    reply = await client.images.generate(prompt=prompt, size=size, extra_body={"seed": SEED})
    return Image.open(io.BytesIO(base64.b64decode(reply.data[0].b64_json)))


if __name__ == "__main__":
    typer.run(main)
