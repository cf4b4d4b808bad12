"""The matcher: how well each of some captions fits each of some pictures."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from services.demo.training.colours import COLOURS

SIZE = 64  # pixels to a side of what the network sees
WEIGHTS = Path(__file__).with_name("weights.safetensors")
# White is the own colour of some things, such as "white heart"; nothing is recoloured to it.
COLOUR_WORDS = (*COLOURS, "white")
COLOURED = re.compile(rf"(?:light )?({'|'.join(COLOUR_WORDS)}) (.+)")
SCORED_AT_ONCE = 256


def split_caption(caption: str) -> tuple[str | None, str]:
    """The colour word that leads a caption, ``None`` if none does, and the noun after it.

    The thing called "red heart" is a heart that is red: it shares its noun with the other hearts.
    """
    match = COLOURED.fullmatch(caption)
    return (match[1], match[2]) if match else (None, caption)


class Network(nn.Module):
    """A convolutional network with two heads: which of ``nouns`` nouns is shown, and in which colour."""

    def __init__(self, nouns: int):
        super().__init__()
        self.body = nn.Sequential(
            _convolution(3, 32, 2),
            _convolution(32, 32, 1),
            _convolution(32, 64, 2),
            _convolution(64, 64, 1),
            _convolution(64, 128, 2),
            _convolution(128, 128, 1),
            _convolution(128, 192, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.noun = nn.Linear(192, nouns)
        self.colour = nn.Linear(192, len(COLOUR_WORDS))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, nouns) and (N, colours) of ``pictures`` (N, 3, SIZE, SIZE) in 0 to 1."""
        features = self.body(2 * pictures - 1)
        return self.noun(features), self.colour(features)


def _convolution(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


class Matcher:
    """A trained network with the ``nouns`` that its first head knows, in order."""

    def __init__(self, network: Network, nouns: Sequence[str]):
        self._network = network.eval()
        self._nouns = {noun: index for index, noun in enumerate(nouns)}

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> "Matcher":
        """The matcher saved at ``path``."""
        with safe_open(path, framework="pt") as file:
            nouns = json.loads(file.metadata()["nouns"])
            network = Network(len(nouns))
            network.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
        return cls(network, nouns)

    def save(self, path: Path = WEIGHTS) -> None:
        """Saves the weights in half precision, with the nouns as metadata."""
        weights = {name: tensor.half().contiguous() for name, tensor in self._network.state_dict().items()}
        save_file(weights, path, metadata={"nouns": json.dumps(list(self._nouns))})

    def score(self, pictures: np.ndarray, captions: Sequence[str]) -> np.ndarray:
        """How well each caption fits each picture: float32 (N, M), higher is better.

        Args:
            pictures: RGB uint8 (N, H, W, 3), the things on white.
            captions: M of a thing's name, or a colour word and a thing's noun.

        Raises:
            KeyError: a caption has another noun than the things that the matcher was trained on.
        """
        split = [split_caption(caption) for caption in captions]
        nouns = torch.tensor([self._nouns[noun] for _, noun in split])
        colours = torch.tensor([COLOUR_WORDS.index(colour) if colour else len(COLOUR_WORDS) for colour, _ in split])
        noun_scores, colour_scores = self._log_probabilities(pictures)
        # One column more, for the captions that leave the colour open: they do as well as a colour that was guessed.
        colour_scores = functional.pad(colour_scores, (0, 1), value=-math.log(len(COLOUR_WORDS)))
        return (noun_scores[:, nouns] + colour_scores[:, colours]).numpy()

    @torch.inference_mode()
    def _log_probabilities(self, pictures: np.ndarray) -> tuple[Tensor, Tensor]:
        parts = [self._network(_as_input(part)) for part in torch.from_numpy(pictures).split(SCORED_AT_ONCE)]
        nouns, colours = (torch.cat(logits).log_softmax(dim=-1) for logits in zip(*parts, strict=True))
        return nouns, colours


def rank_of_own(scores: np.ndarray) -> np.ndarray:
    """The rank of caption i for picture i, 1 for the best: int (N,), from scores (N, M) with M >= N."""
    own = np.diagonal(scores)[:, None]
    return 1 + (scores > own).sum(axis=1)


def _as_input(pictures: Tensor) -> Tensor:
    channels_first = pictures.permute(0, 3, 1, 2).float() / 255
    if channels_first.shape[-2:] == (SIZE, SIZE):
        return channels_first
    return functional.interpolate(channels_first, (SIZE, SIZE), mode="bilinear", antialias=True)
