"""Picture sizes: reading them, judging them, and naming the nearest that a model can draw.

Role: pure functions on `SizeRule`. No size is ever changed silently: what is not legal is refused, with a proposal.
"""

import math
import re

from common.messages import SizeRule

_SIZE = re.compile(r"(-?[0-9]{1,20})x(-?[0-9]{1,20})")


def parse_size(text: str) -> tuple[int, int] | None:
    """Width and height of "WxH", legal or not; None if it isn't of that form."""
    match = _SIZE.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def size_fault(rule: SizeRule, width: int, height: int) -> str | None:
    """Why the model can't draw this size; None if it can."""
    for side in (width, height):
        if side < rule.min_side:
            return f"each side must be at least {rule.min_side} pixels"
        if side > rule.max_side:
            return f"each side must be at most {rule.max_side} pixels"
    if width % rule.multiple or height % rule.multiple:
        return f"width and height must be multiples of {rule.multiple}"
    if width * height > rule.max_pixels:
        return f"width times height must be at most {rule.max_pixels:,} pixels"
    return None


def nearest_size(rule: SizeRule, width: int, height: int) -> tuple[int, int]:
    """The legal size nearest to the one asked for.

    Near is measured in ratios, `ln(w/width)² + ln(h/height)²`, so that a picture that is too large keeps its aspect
    ratio. Exact: each legal width is tried with its best height. Raises `ValueError` if the rule allows no size.
    """
    width, height = max(width, 1), max(height, 1)
    step = rule.multiple
    low = -(-max(rule.min_side, 1) // step) * step
    high = rule.max_side // step * step
    best: tuple[float, int, int] | None = None
    for legal_width in range(low, high + 1, step):
        highest = min(high, rule.max_pixels // legal_width // step * step)
        if highest < low:
            break  # wider ones leave even less height
        below = min(max(height // step * step, low), highest)
        above = min(below + step, highest)
        for legal_height in (below, above):
            distance = math.log(legal_width / width) ** 2 + math.log(legal_height / height) ** 2
            if best is None or distance < best[0]:
                best = (distance, legal_width, legal_height)
    if best is None:
        raise ValueError(f"no size satisfies {rule}")
    return best[1], best[2]
