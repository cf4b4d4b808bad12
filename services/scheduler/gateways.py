"""The gateways that the scheduler knows.

Role: the record of one gateway, which is no more than that it lives. Its requests are in the book, under its name.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Gateway:
    """One live gateway."""

    gateway_id: str
    number: int
    lost_after_s: float
    last_seen: float

    def silent_from(self) -> float:
        """When its silence makes it lost."""
        return self.last_seen + self.lost_after_s
