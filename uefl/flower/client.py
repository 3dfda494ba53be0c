"""What runs at a silo: it rebuilds the method from its name and fields, and runs the serial engine on its own data.

A message names what to do; the code that does it is installed here. What a silo does not know, it refuses, in one line
that the server shows beside the silo's name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from uefl.data.places import cache_folder
from uefl.engines.serial import Serial
from uefl.errors import InputError
from uefl.experiment import DTYPES, Experiment
from uefl.federation import Broadcast, Reply, State, is_words
from uefl.flower import silo as silos
from uefl.flower.kept import Kept
from uefl.flower.wire import body, flat, halved, packed, tensors, whole

log = logging.getLogger("uefl")


class Visit(NamedTuple):
    """One message at one silo, and what the silo itself says about where it keeps things and computes."""

    message: Message
    experiment: Experiment
    mine: silos.Own
    folder: Path
    device: str

    @property
    def order(self) -> dict[str, Any]:
        return body(self.message)


def client_app(find: silos.Find = silos.find, state: Path | None = None) -> ClientApp:
    """The app a node runs. `find` says which silo a node is, `state` where it keeps things unless the node says."""
    app = ClientApp()

    def answering(do: Callable[[Visit], RecordDict]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            node = context.node_config
            name = str(node.get("silo", ""))
            try:
                experiment = Experiment.of(body(message).get("experiment", {}))
                mine = find(experiment, node)
                name = mine.silo.name
                folder = Path(str(node.get("state", state or cache_folder() / "state")))
                content = do(Visit(message, experiment, mine, folder, str(node.get("device", "cpu"))))
            except Exception as e:  # whatever it is, the server hears one line, and the silo's own log has the rest
                log.exception("silo %s refuses", name)
                content = packed({"silo": name, "refused": _line(e)})
            return Message(content, reply_to=message)

        return answer

    app.query()(answering(introduce))
    app.train()(answering(fit))
    app.evaluate()(answering(ask))
    return app


def introduce(visit: Visit) -> RecordDict:
    """Who this node is: a name and counts, no data."""
    silo, classes = visit.mine
    facts = {"silo": silo.name, "domain": silo.domain, "size": len(silo.train.y)}
    return packed({**facts, "shape": list(silo.test.x.shape[1:]), "classes": list(classes)})


def fit(visit: Visit) -> RecordDict:
    """Measure the model received, train it, measure what became of it; keep what the method keeps."""
    order, method = visit.order, visit.experiment.method
    engine, say, kept, note = _ready(visit, order)
    (reply,) = engine.fit(method, say, measure=bool(order["measure"]))
    memory = engine.memory[reply.who]
    if memory:
        kept.write(memory, say.round, int(order["accepted"]))
    return _reply(reply, order, note, keeps=bool(memory))


def ask(visit: Visit) -> RecordDict:
    """Answer a task of the method."""
    order, method = visit.order, visit.experiment.method
    task = str(order["task"])
    if task.startswith("_") or not callable(getattr(type(method), task, None)):
        raise InputError(f"method {visit.experiment.name} has no task '{task}'")
    engine, say, _, note = _ready(visit, order)
    (reply,) = engine.ask(method, task, say, order["on"])
    return _reply(reply, order, note)


def _ready(visit: Visit, order: dict[str, Any]) -> tuple[Serial, Broadcast, Kept, str]:
    """The serial engine with this one silo, what was said to it, and what it kept."""
    experiment, name = visit.experiment, visit.mine.silo.name
    if order["silo"] != name:
        raise InputError(f"this message is for silo {order['silo']}, this node is {name}")
    silo = silos.aligned(visit.mine, tuple(order["classes"]))
    shape, here = tuple(order["shape"]), tuple(silo.test.x.shape[1:])
    if here != shape:
        raise InputError(f"images here are {here}, the federation's are {shape}; say data.size")
    net = experiment.network(shape, len(order["classes"]))
    engine = Serial([silo], net, seed=experiment.seed, dtype=DTYPES[experiment.precision], device=visit.device)
    kept = Kept(visit.folder, str(order["run"]), name)
    memory, note = kept.read(int(order["accepted"]))
    engine.memory[name] = _placed(memory, engine)
    state, sent = (_placed(whole(tensors(visit.message, kind), engine.dtype), engine) for kind in ("state", "sent"))
    words = next((len(t) for n, t in state.items() if is_words(n)), 0)
    access = torch.ones(1, words, dtype=torch.bool)  # all that came is its own
    say = Broadcast(int(order["round"]), state, (name,), access, sent, (name,), float(order["rate"]))
    return engine, say, kept, note


def _placed(state: State, engine: Serial) -> State:
    return {n: t.to(engine.device) for n, t in state.items()}


def _reply(reply: Reply, order: dict[str, Any], note: str, *, keeps: bool = False) -> RecordDict:
    told = {"silo": reply.who, "size": reply.size, "seconds": reply.seconds, "note": note, "keeps": keeps}
    small = halved if order["half"] else dict
    return packed(told, tensors=small(reply.tensors), extra=small(reply.extra), answers=flat(reply.answers))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
