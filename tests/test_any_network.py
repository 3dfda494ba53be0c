"""Anyone's network and method, on every engine: frozen weights, own randomness, losses that look at the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stripes import LOCAL, ROUNDS, clients, encoder, network, play
from torch import Tensor, nn

from uefl import FedAvg, Silo
from uefl.engines import Serial, Stacked, stacking
from uefl.engines.watched import watched
from uefl.federation import Batch, Model

ENGINES: dict[str, Any] = {
    "serial": Serial,
    "stacked": Stacked,
    "one at a time": partial(Stacked, chunk=1),
    "compiled": partial(Stacked, chunk=1, compiled=True),
}
ONE = FedAvg(**{**ROUNDS, "rounds": 1, "iterations": 1})


@pytest.fixture(autouse=True)
def _plain_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uefl.engines.compiling.BACKEND", "aot_eager")
    torch._dynamo.reset()


def frozen() -> nn.Module:
    body = encoder()
    body[0].requires_grad_(False)
    return body


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_stay_and_the_others_learn(engine: str) -> None:
    before = network(ONE, body=frozen).state_dict()
    after, _ = play(ONE, clients(ONE, engine=ENGINES[engine], body=frozen))
    assert torch.equal(after.state["encoder.0.weight"], before["encoder.0.weight"])
    assert not torch.equal(after.state["encoder.3.weight"], before["encoder.3.weight"])


class Dropping(nn.Module):
    """Draws by a function, which no search for modules finds."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def test_what_a_network_draws_by_itself_is_seeded_and_leaves_the_users_generator_alone() -> None:
    def ended(start: int) -> Any:
        torch.manual_seed(start)
        server, _ = play(ONE, clients(ONE, body=lambda: nn.Sequential(encoder(), Dropping())))
        return server.state, torch.rand(3)

    (one, drawn), (other, drawn_after) = ended(1), ended(2)
    assert all(torch.equal(t, other[n]) for n, t in one.items())
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.equal(drawn, drawn_after)


@dataclass(frozen=True, kw_only=True)
class Hurrying(FedAvg):
    """Later steps count more, and later epochs."""

    def loss(self, model: Model, batch: Batch) -> Tensor:
        _, _, step, epoch = batch
        return super().loss(model, batch._replace(step=0)) * (1 + 0.5 * step) * (1 + epoch)


@pytest.mark.parametrize("engine", ["stacked", "one at a time", "compiled"])
def test_a_loss_may_look_at_step_and_epoch(engine: str) -> None:
    method = Hurrying(**{**ROUNDS, "rounds": 2, "iterations": 1, "local": replace(LOCAL, epochs=3, clip=0.1)})
    ours, theirs = (play(method, clients(method, dtype=torch.float64, engine=e))[0] for e in (ENGINES[engine], Serial))
    for n, t in theirs.state.items():
        torch.testing.assert_close(ours.state[n], t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "read",
    [lambda b: b.epoch, lambda b: b[3], lambda b: b[-1], lambda b: list(b), lambda b: b._replace(x=0).epoch],
    ids=["name", "index", "from the end", "all", "changed"],
)
def test_reading_the_epoch_is_noticed_however_it_is_done(read: Any) -> None:
    heard: list[int] = []
    batch = watched(Batch(1, 2, 3, 4), lambda: heard.append(1))  # type: ignore[arg-type]
    assert (batch.x, batch.y, batch.step) == (1, 2, 3)
    assert not heard
    read(batch)
    assert heard


def test_measuring_takes_no_more_silos_at_a_time_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(ONE, local=replace(LOCAL, batch=2, evaluation_batch=14))
    engine = clients(method, engine=Stacked)
    seen: list[tuple[int, int]] = []
    sums = Stacked._sums

    def counted(self: Stacked, *args: Any) -> Any:
        seen.append((len(args[2].names), args[-1]))
        return sums(self, *args)

    monkeypatch.setattr(Stacked, "_sums", counted)
    monkeypatch.setitem(stacking.MOST, "cpu", engine._size.total * 2 * 14)  # two silos of 14 images
    bounded, _ = play(method, engine)
    assert {most for most, size in seen if size == 14} == {2}
    monkeypatch.undo()
    free, _ = play(method, clients(method, engine=Stacked))
    for n, t in free.state.items():
        torch.testing.assert_close(bounded.state[n], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_one_silo_is_a_federation_too(engine: str) -> None:
    only = Silo.split("only", torch.randn(30, 1, 8, 8), torch.arange(30) % 3)
    server, records = play(ONE, clients(ONE, [only], engine=ENGINES[engine]))
    assert server.round == 1
    assert list(records[-1]["silos"]) == ["only"]
