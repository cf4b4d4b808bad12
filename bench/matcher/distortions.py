"""Pictures made worse at random, as a generator would: the matcher has to know them all the same.

All take and return pictures as float (N, 3, H, W) in 0 to 1, and draw from torch's global random numbers.
"""

import torch
from torch import Tensor
from torch.nn import functional

SCALE = (0.72, 1.04)
TURN = 0.22  # radians to each side
BLURRED_TO = (64, 64, 44, 32, 24, 18)  # pixels to a side that are left of the detail
HUE_TURN = 0.5  # radians to each side
CUT_SHARE = 0.4
# From RGB to luma and two differences of colours (YIQ), in whose plane a rotation changes the hue alone.
TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


def distort(pictures: Tensor, keep_hue: Tensor) -> Tensor:
    """All distortions; the hue stays where ``keep_hue`` (N,) is true."""
    return _noisy(_blurred(_cut(_tinted(_moved(pictures), keep_hue)))).clamp(0, 1)


def _uniform(count: int, low: float, high: float) -> Tensor:
    return torch.empty(count).uniform_(low, high)


def _moved(pictures: Tensor) -> Tensor:
    """Scaled, mirrored, turned and shifted; what comes in from outside is white."""
    count = len(pictures)
    scale, angle = _uniform(count, *SCALE), _uniform(count, -TURN, TURN)
    mirror = torch.randint(2, (count,)) * 2 - 1
    room = 1.08 - scale
    cosine, sine = angle.cos() / scale, angle.sin() / scale
    across = torch.stack([mirror * cosine, -mirror * sine, _uniform(count, -1, 1) * room], dim=-1)
    down = torch.stack([sine, cosine, _uniform(count, -1, 1) * room], dim=-1)
    grid = functional.affine_grid(torch.stack([across, down], dim=1), list(pictures.shape), align_corners=False)
    return 1 - functional.grid_sample(1 - pictures, grid, align_corners=False)


def _tinted(pictures: Tensor, keep_hue: Tensor) -> Tensor:
    """Other hues, saturations, contrasts and brightnesses."""
    count = len(pictures)
    hue = _uniform(count, -HUE_TURN, HUE_TURN) * ~keep_hue
    saturation = _uniform(count, 0.7, 1.25) * ~keep_hue + _uniform(count, 0.9, 1.1) * keep_hue
    rotation = torch.zeros(count, 3, 3)
    rotation[:, 0, 0] = 1
    rotation[:, 1, 1] = rotation[:, 2, 2] = saturation * hue.cos()
    rotation[:, 1, 2] = saturation * -hue.sin()
    rotation[:, 2, 1] = saturation * hue.sin()
    mixing = TO_YIQ.inverse() @ rotation @ TO_YIQ * _uniform(count, 0.8, 1.15)[:, None, None]
    # About white, so that the background stays.
    tinted = torch.bmm(mixing, (pictures - 1).flatten(2)).view_as(pictures) + 1
    return tinted + _uniform(count, -0.06, 0.06)[:, None, None, None]


def _cut(pictures: Tensor) -> Tensor:
    """Some with a rectangle of one grey over them."""
    count, _, height, width = pictures.shape
    rows, columns = torch.arange(height), torch.arange(width)

    def inside(places: Tensor) -> Tensor:
        length = _uniform(count, 0.15, 0.45) * len(places)
        start = _uniform(count, 0, 1) * (len(places) - length)
        return (places >= start[:, None]) & (places < (start + length)[:, None])

    covered = inside(rows)[:, None, :, None] & inside(columns)[:, None, None, :]
    covered &= (torch.rand(count) < CUT_SHARE)[:, None, None, None]
    return torch.where(covered, torch.rand(count, 1, 1, 1).sqrt(), pictures)


def _blurred(pictures: Tensor) -> Tensor:
    """Sixths of the batch, each with the detail of a smaller picture."""
    size = pictures.shape[-1]
    return torch.cat(
        [
            part
            if left >= size
            else functional.interpolate(
                functional.interpolate(part, (left, left), mode="area"), (size, size), mode="bilinear"
            )
            for part, left in zip(pictures.tensor_split(len(BLURRED_TO)), BLURRED_TO, strict=True)
        ]
    )


def _noisy(pictures: Tensor) -> Tensor:
    """With noise from pixel to pixel and with blotches, of a strength that differs from picture to picture."""
    count, size = len(pictures), pictures.shape[-1]
    fine = torch.randn_like(pictures) * 0.1 * torch.rand(count, 1, 1, 1).square()
    blotches = torch.randn(count, 3, size // 8, size // 8) * 0.12 * torch.rand(count, 1, 1, 1).square()
    return pictures + fine + functional.interpolate(blotches, (size, size), mode="bilinear")
