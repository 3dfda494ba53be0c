"""Pull replies from the grid, one message at a time: Flower decodes the bytes of a silo while it pulls them.

Flower drops all replies of a request if one of them cannot be decoded, so each has a request of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from uefl.core.errors import ResumableError

CONNECTION_ERRORS = (ResumableError, httpx.HTTPError, OSError)  # not caused by the content of a reply


def pull_replies(grid: Grid, message_ids: Iterable[str]) -> Iterator[tuple[str, Message | str]]:
    """Yield the replies that have arrived by the id of their message; a text gives the reason why one is unreadable."""
    for message_id in message_ids:
        try:
            replies = list(grid.pull_messages([message_id]))
        except CONNECTION_ERRORS:
            raise
        except Exception as e:  # the silo chooses the bytes that Flower decodes
            yield message_id, f"the reply cannot be decoded ({type(e).__name__})"
        else:
            yield from ((message_id, reply) for reply in replies[:1])
