"""Who is there. Node ids come and go; a silo is known by the name it gives when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from uefl.errors import InputError, Stopped
from uefl.flower.wire import letter, said

MOST = 2**40  # examples that we believe a silo to have


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, and how little is still enough."""

    wait: float = 120.0  # seconds for silos to be there
    deadline: float = 3600.0  # seconds for an answer, and the life of a message
    quorum: int = 0  # silos that must answer well, for a round to count; 0: more than half
    retries: int = 2  # times that silos which failed are asked again while the quorum is not met
    poll: float = 0.1  # seconds between two looks

    def __post_init__(self) -> None:
        for name in ("wait", "deadline", "quorum", "retries", "poll"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}={getattr(self, name)} must not be negative")

    def enough(self, silos: int) -> int:
        """The quorum of so many silos."""
        return min(self.quorum or silos // 2 + 1, silos)


class Fact(NamedTuple):
    """What a silo says of itself."""

    silo: str
    domain: str
    size: int
    shape: tuple[int, ...]
    classes: tuple[str, ...]


class Census:
    """Silos by name and the nodes they are reached at. `hear` is told who came and who was turned away."""

    def __init__(
        self,
        grid: Grid,
        experiment: Mapping[str, Any],
        patience: Patience,
        hear: Callable[[str, str], None] = lambda _silo, _what: None,
    ) -> None:
        self.grid, self.experiment, self.patience, self.hear = grid, dict(experiment), patience, hear
        self.facts: dict[str, Fact] = {}
        self.nodes: dict[str, int] = {}  # by name
        self.refused: dict[int, str] = {}  # nodes that cannot take part, and why
        self._asked: dict[str, int] = {}  # queries on their way, and to which node

    def gather(self, count: int, known: Sequence[Fact] = ()) -> list[Fact]:
        """Wait for so many silos, or for those of a run that goes on; a quorum of them is enough in the end."""
        self.facts = {fact.silo: fact for fact in known}
        names, count = set(self.facts), len(known) or count

        def there() -> list[str]:
            return sorted(name for name in self.nodes if name in names or not names)

        self._until(lambda: len(there()) + len(self.refused) >= count)
        if len(there()) < max(self.patience.enough(count), 1):
            why = "".join(f"; {reason}" for reason in self.refused.values())
            raise Stopped(
                f"{len(there())} of {count} silos are there after {self.patience.wait:.0f} s, "
                f"{self.patience.enough(count)} are needed{why}"
            )
        return list(known) or [self.facts[name] for name in there()]

    def present(self, names: Sequence[str]) -> dict[str, int]:
        """The nodes of these silos, of those that are there; waits only while they are too few."""
        for node in self.refused:  # its folder may be readable by now
            self._ask(node)
        self.refused.clear()
        enough = self.patience.enough(len(names))
        self._until(lambda: sum(name in self.nodes for name in names) >= enough)
        return {name: self.nodes[name] for name in names if name in self.nodes}

    def doubt(self, name: str) -> None:
        """Ask this silo's node anew who it is before the next message."""
        self.nodes.pop(name, None)

    def _until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self.patience.wait
        while True:
            self._look()
            if done() or time.monotonic() > end:
                return
            time.sleep(self.patience.poll)

    def _look(self) -> None:
        """Greet new nodes, forget gone ones, hear the answers that came."""
        there = set(self.grid.get_node_ids())
        self.nodes = {name: node for name, node in self.nodes.items() if node in there}
        self._asked = {query: node for query, node in self._asked.items() if node in there}
        self.refused = {node: why for node, why in self.refused.items() if node in there}
        for node in there - {*self.nodes.values(), *self._asked.values(), *self.refused}:
            self._ask(node)
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            self._meet(self._asked.pop(reply.metadata.reply_to_message_id), reply)

    def _ask(self, node: int) -> None:
        message = letter({"experiment": self.experiment}, node, "query", life=self.patience.wait)
        for query in self.grid.push_messages([message]):
            if query:
                self._asked[query] = node

    def _meet(self, node: int, reply: Message) -> None:
        try:
            fact = _fact(reply)
            if fact.silo in self.nodes:
                raise InputError(f"silo {fact.silo}: a second node calls itself so")
        except InputError as e:
            self.refused[node] = str(e)
            self.hear("", str(e))
            return
        self.facts.setdefault(fact.silo, fact)  # a silo that comes back is the one that left
        self.nodes[fact.silo] = node
        self.hear(fact.silo, "is there")


def _fact(reply: Message) -> Fact:
    told = said(reply)
    if told.get("refused"):
        raise InputError(f"silo {told.get('silo') or '?'} cannot take part: {told['refused']}")
    try:
        shape, classes = tuple(map(int, told["shape"])), tuple(map(str, told["classes"]))
        fact = Fact(str(told["silo"]), str(told["domain"]), int(told["size"]), shape, classes)
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise InputError(f"a node does not say who it is: {e}") from e
    if not 0 <= fact.size < MOST or not fact.silo:
        raise InputError(f"silo {fact.silo or '?'} says it has {fact.size} examples")
    return fact
