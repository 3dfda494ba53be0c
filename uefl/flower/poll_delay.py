"""Polling that is fast after a message and slow while nothing arrives, since every poll is a request."""

from __future__ import annotations

import time
from dataclasses import dataclass

SHORTEST_SECONDS, GROWTH = 0.1, 1.2


@dataclass
class PollDelay:
    """The delay between two polls: a tenth of a second at first, then longer up to a limit."""

    longest: float
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Poll fast again, because a message arrived."""
        self.seconds = min(SHORTEST_SECONDS, self.longest)

    def wait(self) -> None:
        """Wait until the next poll."""
        time.sleep(self.seconds)
        self.seconds = min(self.longest, self.seconds * GROWTH)
