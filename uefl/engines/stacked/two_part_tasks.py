"""Client tasks in two parts: the first runs silo by silo, the second for many silos at once, as K-means does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from uefl.core.federation import Reply, TaskParts, size_in_bytes

MAX_PREPARED_BYTES = 1 << 29  # answers of first parts, such as features for K-means, that wait for the second part


def complete_answers(parts: TaskParts, prepared: Iterable[Reply]) -> Iterator[Reply]:
    """Run the second part of a client task for as many silos at once as memory allows."""
    waiting: list[Reply] = []
    for reply in prepared:
        if sum(r.sent_bytes for r in (*waiting, reply)) > MAX_PREPARED_BYTES:
            yield from _complete_together(parts, waiting)
            waiting = []
        waiting.append(reply)
    yield from _complete_together(parts, waiting)


def _complete_together(parts: TaskParts, prepared: Sequence[Reply]) -> Iterator[Reply]:
    started = time.perf_counter()
    with torch.no_grad():
        completed = iter(parts.complete([tensors for reply in prepared for tensors in reply.answers.values()]))
    for reply in prepared:
        answers = {split: next(completed) for split in reply.answers}
        yield reply._replace(
            answers=answers,
            sent_bytes=sum(map(size_in_bytes, answers.values())),
            seconds=reply.seconds + (time.perf_counter() - started) / len(prepared),
        )
