"""Pull replies from the grid in threads: a silo controls the bytes that Flower decodes, and how fast they arrive.

Flower drops all replies of a request if one of them cannot be decoded, and a pull waits for the rest of an incomplete
upload. Each reply therefore has a request and a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from uefl.core.errors import ResumableError
from uefl.flower.fleet_connection import pull_reply

CONNECTION_ERRORS = (ResumableError, httpx.HTTPError, OSError)  # not caused by the content of a reply
MAX_WAIT_SECONDS = 0.5  # of one poll for pulls that are under way


class ReplyPuller:
    """Pull the replies to messages; a pull that takes long continues while others are polled."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pulls: dict[str, Future[list[Message]]] = {}  # under way, by message id

    def pull_replies(self, message_ids: Collection[str]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, by message id; a text is the reason why one cannot be decoded."""
        self._pulls = {
            message_id: self._pulls.get(message_id) or self._start_pull(message_id) for message_id in message_ids
        }
        wait(self._pulls.values(), MAX_WAIT_SECONDS)
        for message_id in [message_id for message_id, pull in self._pulls.items() if pull.done()]:
            try:
                replies = self._pulls.pop(message_id).result()
            except CONNECTION_ERRORS:
                raise
            except Exception as e:  # the silo chooses the bytes
                yield message_id, f"the reply cannot be decoded ({type(e).__name__})"
            else:
                yield from ((message_id, reply) for reply in replies[:1])

    def _start_pull(self, message_id: str) -> Future[list[Message]]:
        future: Future[list[Message]] = Future()

        def pull() -> None:
            try:
                future.set_result(pull_reply(self._grid, message_id))
            except BaseException as e:  # an error in a thread is not raised anywhere else
                future.set_exception(e)

        threading.Thread(target=pull, name=f"pull-{message_id}", daemon=True).start()
        return future
