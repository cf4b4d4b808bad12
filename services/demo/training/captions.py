"""What is said about a picture: names, tags, colours. And which combinations are never said, to be asked for later."""

import re

import numpy as np

from services.demo.training.colours import COLOURS
from services.demo.training.pictures import Thing

# Never trained on, as picture or as words: what the model makes of them is what it has learnt about combining.
HELD_OUT = frozenset(
    tuple(pair.split(" ", maxsplit=1))
    for pair in [
        "blue red apple",
        "blue banana",
        "blue crab",
        "blue star",
        "blue carrot",
        "purple frog",
        "purple guitar",
        "purple fire engine",
        "purple lemon",
        "green automobile",
        "green octopus",
        "green fox",
        "green bell",
        "green trophy",
        "pink umbrella",
        "pink tomato",
        "pink cactus",
        "yellow rose",
        "yellow backpack",
        "yellow necktie",
        "black balloon",
        "black strawberry",
        "black teapot",
        "orange whale",
        "orange butterfly",
        "orange jeans",
        "red fish",
        "red key",
        "red bear",
        "grey jack-o-lantern",
        "grey parrot",
        "brown crown",
    ]
)
COLOUR_WORDS = frozenset(COLOURS) | {"white"}
LEADING_COLOUR = re.compile(rf"^(?:light )?(?:{'|'.join(sorted(COLOUR_WORDS))}) (?=.)")
OPENINGS = ("", "", "", "a ", "a ", "an emoji of ", "an emoji of a ", "a picture of ", "a picture of a ", "the ")


def noun(name: str) -> str:
    """A thing's name without the colour that leads it: what another colour word can be put before."""
    return LEADING_COLOUR.sub("", name, count=1)


def uncoloured_names(thing: Thing) -> list[str]:
    """What a thing may be called after a colour word, its own name first."""
    aliases = [alias for alias in thing.aliases if not COLOUR_WORDS & set(alias.split())]
    return [noun(thing.name), *aliases]


def colours_to_learn(things: list[Thing], held_out: frozenset[tuple[str, str]]) -> list[tuple[str, ...]]:
    """For each thing, the colours in which it may be shown: none that would be said in the words of ``held_out``.

    Names are shared: a green apple in blue is a "blue apple" too.
    """
    by_name = {thing.name: thing for thing in things}
    never_said = {
        (colour, said) for colour, name in held_out if name in by_name for said in uncoloured_names(by_name[name])
    }
    return [
        tuple(colour for colour in COLOURS if not {(colour, said) for said in uncoloured_names(thing)} & never_said)
        for thing in things
    ]


def caption(thing: Thing, colour: str | None, random: np.random.Generator) -> str:
    """One of the things that could be said about a picture of ``thing``, which was given ``colour`` if not ``None``."""
    if colour:
        names = uncoloured_names(thing)
        said = names[0] if random.random() < 0.7 else _any(names, random)
        return f"{_any(OPENINGS, random)}{colour} {said}"
    opening, kind = _any(OPENINGS, random), random.random()
    if kind < 0.62:
        return f"{opening}{thing.name}"
    if kind < 0.78 and thing.tags:
        tags = random.permutation(thing.tags)[: int(random.integers(1, 3))]
        return f"{opening}{thing.name}, {', '.join(tags)}"
    if kind < 0.94 and thing.aliases:
        return f"{opening}{_any(thing.aliases, random)}"
    return f"{opening}{_any(thing.tags, random) or thing.name}"


def _any(choices, random: np.random.Generator):
    return choices[int(random.integers(len(choices)))] if len(choices) else None
