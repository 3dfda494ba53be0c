"""Users' networks and methods on every engine: frozen weights, other random layers, losses that read step and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_encoder,
    make_network,
    run_rounds,
)
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Batch, Broadcast, ClientModel, Silo, Update
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked import stack_size
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.engines.stacked.task_runner import TaskRunner
from uefl.experiment.train import train

ENGINES: dict[str, Any] = {
    "serial": SerialEngine,
    "stacked": StackedEngine,
    "one silo per stack": partial(StackedEngine, max_stack_size=1),
    "compiled": partial(StackedEngine, max_stack_size=1, use_compiler=True),
}
ONE_ROUND = FedAvg(**{**SHORT_RUN, "rounds": 1, "iterations": 1})


@pytest.fixture(autouse=True)
def _eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uefl.engines.stacked.compiler.COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()


def make_partly_frozen_encoder() -> nn.Module:
    encoder = make_encoder()
    encoder[0].requires_grad_(False)  # type: ignore[index]
    return encoder


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_weights_stay_and_the_others_learn(engine: str) -> None:
    before = make_network(ONE_ROUND, encoder_factory=make_partly_frozen_encoder).state_dict()
    clients = make_clients(ONE_ROUND, engine=ENGINES[engine], encoder_factory=make_partly_frozen_encoder)
    after = run_rounds(ONE_ROUND, clients)[0].model_state
    assert torch.equal(after["encoder.0.weight"], before["encoder.0.weight"])
    assert not torch.equal(after["encoder.3.weight"], before["encoder.3.weight"])


class FunctionalDropout(nn.Module):
    """Dropout by a function, which a search for modules does not find."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def test_a_networks_own_draws_are_seeded_and_the_users_generator_stays_unchanged() -> None:
    def train(seed: int) -> Any:
        torch.manual_seed(seed)
        clients = make_clients(ONE_ROUND, encoder_factory=lambda: nn.Sequential(make_encoder(), FunctionalDropout()))
        server, _ = run_rounds(ONE_ROUND, clients)
        return server.model_state, torch.rand(3)

    (one, draws), (other, other_draws) = train(1), train(2)
    assert have_equal_bits(one, other)
    torch.manual_seed(1)
    assert torch.equal(draws, torch.rand(3))
    assert not torch.equal(draws, other_draws)


@dataclass(frozen=True, kw_only=True)
class TimedLoss(FedAvg):
    """Later steps have a larger weight, and later epochs if the update declares that it needs them."""

    per_epoch: bool = True

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        return [update._replace(per_epoch=self.per_epoch) for update in super().make_updates(broadcast)]

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        return super().loss(model, batch._replace(step=0)) * (1 + 0.5 * batch.step) * (1 + batch.epoch)


def run_timed(engine: str, *, per_epoch: bool) -> dict[str, Tensor]:
    """Return the final weights; steps of SGD are proportional to the scale of the loss."""
    local = replace(LOCAL, epochs=3, optimizer="sgd", lr=0.01)
    method = TimedLoss(**{**SHORT_RUN, "rounds": 2, "iterations": 1, "local": local}, per_epoch=per_epoch)
    server, _ = run_rounds(method, make_clients(method, dtype=torch.float64, engine=ENGINES[engine]))
    return dict(server.model_state)


@pytest.mark.parametrize("per_epoch", [True, False], ids=["declared", "not declared"])
@pytest.mark.parametrize("engine", ["stacked", "one silo per stack", "compiled"])
def test_engines_agree_on_a_loss_that_reads_step_and_epoch(engine: str, per_epoch: bool) -> None:
    tensors, expected = (run_timed(e, per_epoch=per_epoch) for e in (engine, "serial"))
    for n, t in expected.items():
        torch.testing.assert_close(tensors[n], t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("per_epoch", [True, False], ids=["declared", "not declared"])
def test_a_loss_reads_the_epoch_only_if_its_update_declares_that(engine: str, per_epoch: bool) -> None:
    epochs = set()

    @dataclass(frozen=True, kw_only=True)
    class RecordingLoss(TimedLoss):
        def loss(self, model: ClientModel, batch: Batch) -> Tensor:
            epochs.add(batch.epoch)
            return super().loss(model, batch)

    fields = {**SHORT_RUN, "rounds": 1, "iterations": 1, "local": replace(LOCAL, epochs=3)}
    method = RecordingLoss(**fields, per_epoch=per_epoch)
    run_rounds(method, make_clients(method, engine=ENGINES[engine]))
    assert epochs == ({0, 1, 2} if per_epoch else {0})


def test_evaluation_stacks_no_more_silos_than_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(ONE_ROUND, local=replace(LOCAL, batch_size=2, eval_batch_size=14))
    engine = make_clients(method, engine=StackedEngine)
    calls: list[tuple[int, int]] = []
    compute_sums = TaskRunner._compute_sums

    def record_call(self: TaskRunner, *args: Any) -> Any:
        calls.append((len(args[2].silo_names), args[-1]))
        return compute_sums(self, *args)

    monkeypatch.setattr(TaskRunner, "_compute_sums", record_call)
    two_silos = engine._activations.total * 2 * 14
    monkeypatch.setitem(stack_size.MAX_STACK_ACTIVATIONS, "cpu", two_silos)
    bounded, _ = run_rounds(method, engine)
    assert {num_silos for num_silos, length in calls if length == 14} == {2}
    monkeypatch.undo()
    unbounded, _ = run_rounds(method, make_clients(method, engine=StackedEngine))
    for n, t in unbounded.model_state.items():
        # Single precision: stacks of another size sum in another order.
        torch.testing.assert_close(bounded.model_state[n], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_a_federation_may_have_one_silo(engine: str) -> None:
    silo = Silo.from_tensors("only", torch.randn(30, 1, 8, 8), torch.arange(30) % 3)
    server, records = run_rounds(ONE_ROUND, make_clients(ONE_ROUND, [silo], engine=ENGINES[engine]))
    assert server.round == 1
    assert list(records[-1]["silos"]) == ["only"]


class TokenEncoder(nn.Module):
    """Embed tokens and mix neighbors: int64 [B, l] -> [B, l, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(20, 8), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        assert not tokens.is_floating_point()
        z = self.embedding(tokens)
        return self.mix(torch.cat([z, z.roll(1, 1)], -1))


def make_token_silos(dtype: torch.dtype) -> list[Silo]:
    """Return sequences of 6 tokens; the class is whether token 0 or token 1 occurs."""
    silos = []
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        x = torch.randint(2, 20, (80, 6), generator=generator)
        y = torch.arange(80) % 2
        x[torch.arange(80), torch.randint(6, (80,), generator=generator)] = y
        silos.append(Silo.from_tensors(f"silo {k}", x.to(dtype), y))
    return silos


@pytest.mark.parametrize("engine", ["serial", "stacked"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_encoder_of_integer_tokens_learns(engine: str, dtype: torch.dtype) -> None:
    local = replace(LOCAL, lr=1e-2, epochs=3)
    method = UEFL(**{**SHORT_RUN, "rounds": 4, "local": local, "codebook": SMALL_CODEBOOK})
    result = train(method, make_token_silos(dtype), TokenEncoder(), num_classes=2, hidden_size=16, engine=engine)
    assert result.clients.silos["silo 0"].train.x.dtype == dtype
    assert result.accuracy > 0.8
