"""The captions that the demo checkpoint is measured with: names of things, and combinations it was never shown."""

from dataclasses import dataclass

from services.demo.training.captions import HELD_OUT, noun

NAMED = (
    "pizza",
    "rocket",
    "bicycle",
    "soccer ball",
    "penguin",
    "sunflower",
    "house",
    "cat face",
    "elephant",
    "snail",
    "owl",
    "shark",
    "lady beetle",
    "palm tree",
    "cherries",
    "watermelon",
    "pineapple",
    "hamburger",
    "doughnut",
    "ice cream",
    "birthday cake",
    "castle",
    "sailboat",
    "airplane",
    "snowman",
    "rainbow",
    "camera",
    "scissors",
    "violin",
    "light bulb",
    "hammer",
    "smiling face with sunglasses",
)


@dataclass(frozen=True)
class Prompt:
    """A ``caption`` to draw: a thing, by the name it has in ``load_things``, in a colour or (``None``) in its own."""

    caption: str
    thing: str
    colour: str | None


PROMPTS = (
    *(Prompt(name, name, None) for name in NAMED),
    *(Prompt(f"{colour} {noun(name)}", name, colour) for colour, name in sorted(HELD_OUT)),
)
