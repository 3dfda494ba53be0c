"""FCCL: logits on public images, the cross-correlation loss and the two teachers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import (
    BATCH_NORM_MODEL,
    bind_model,
    build_model,
    have_equal_bits,
    make_batch,
    make_method,
    make_pattern_silos,
    make_public_images,
    max_difference,
    run_method,
)

from uefl.algorithms.fccl import (
    FCCL,
    LOGITS,
    NUM_ROUNDS,
    PRETRAINED_PREFIX,
    PREVIOUS_PREFIX,
    cross_correlation_loss,
    kl_divergence,
)
from uefl.core.errors import InputError
from uefl.core.federation import Reply, ServerState
from uefl.core.local import LocalTraining
from uefl.core.noise import derive_key, normal

WITHOUT_TERMS = {"public_epochs": 0, "intra_weight": 0.0, "inter_weight": 0.0}


def get_network(run, silo_name):
    """Return the network of a silo, without the teachers."""
    names = run.clients.net.state_dict()
    return {n: t for n, t in run.clients.client_states[silo_name].items() if n in names}


def test_without_its_terms_it_is_local_only_bit_for_bit():
    a, b = run_method(make_method("fccl", **WITHOUT_TERMS)), run_method(make_method("local-only"))
    for name in ("silo 0", "silo 1", "silo 2"):
        assert have_equal_bits(get_network(a, name), get_network(b, name))


@pytest.mark.parametrize("changes", [{"public_epochs": 1}, {"intra_weight": 1.0}, {"inter_weight": 1.0}])
def test_each_term_alone_changes_the_networks_after_the_first_round(changes):
    for rounds, is_equal in ((1, True), (2, False)):
        a = run_method(make_method("fccl", **WITHOUT_TERMS), rounds=rounds)
        b = run_method(make_method("fccl", **WITHOUT_TERMS | changes), rounds=rounds)
        assert have_equal_bits(get_network(a, "silo 0"), get_network(b, "silo 0")) == is_equal


def test_only_logits_travel():
    run = run_method(make_method("fccl"))
    assert run.clients.sent_names - {"num_examples"} >= {LOGITS}
    assert run.clients.received_names == {LOGITS}
    assert not run.server.model_state
    num_public = len(make_public_images())
    for reply in run.clients.replies:
        assert not reply.tensors
        assert {n: tuple(t.shape) for n, t in reply.extras.items()} == {LOGITS: (num_public, 3)}


def test_the_server_sends_the_mean_of_the_logits_of_the_last_round():
    method = make_method("fccl")
    run = run_method(method, rounds=2, dtype=torch.float64)
    last = torch.stack([reply.extras[LOGITS] for reply in run.clients.replies[-3:]])
    assert torch.allclose(method.make_extras(run.server)[LOGITS], last.mean(0), atol=1e-12)
    assert not method.make_extras(run.server.replace(round=0))


def test_logits_are_those_of_the_trained_network_on_the_public_images():
    run = run_method(make_method("fccl"), rounds=1, dtype=torch.float64)
    net = run.clients.net.eval()
    net.load_state_dict(get_network(run, "silo 1"))
    with torch.no_grad():
        logits = net(make_public_images().double()).logits[0]
    assert torch.allclose(run.clients.replies[1].extras[LOGITS], logits, atol=1e-12)


def test_logits_of_another_shape_are_left_out():
    method = make_method("fccl")
    run = run_method(method, rounds=1)
    replies = run.clients.replies
    odd = replies[0]._replace(extras={LOGITS: torch.zeros(2, 3)})
    mean = method.update_method_state(run.server, [odd, *replies[1:]]).method_state[LOGITS]
    assert torch.equal(mean, torch.stack([r.extras[LOGITS] for r in replies[1:]]).mean(0))


def test_the_cross_correlation_loss_is_that_of_the_definition():
    a, b = (normal(derive_key(n), (9, 4)).double() for n in "ab")
    za, zb = ((x - x.mean(0)) / x.std(0) for x in (a, b))
    expected = torch.zeros(()).double()
    for d in range(4):
        for e in range(4):
            m = (za[:, d] * zb[:, e]).sum() / 9
            expected += (m - 1) ** 2 if d == e else 0.5 * (m + 1) ** 2
    assert torch.allclose(cross_correlation_loss(a, b, 0.5), expected, atol=1e-6)
    constant = torch.ones(9, 4, dtype=torch.float64, requires_grad=True)
    cross_correlation_loss(constant, b, 0.5).backward()
    assert constant.grad.isfinite().all()


def test_the_collaborative_phase_brings_logits_closer_to_their_mean():
    near, far = (run_method(make_method("fccl", rounds=4, public_epochs=epochs)) for epochs in (8, 0))
    spread = [
        torch.stack([reply.extras[LOGITS].softmax(-1) for reply in run.clients.replies[-3:]]).var(0).mean()
        for run in (near, far)
    ]
    assert spread[0] < spread[1]


def test_the_first_teacher_is_the_network_after_the_pretraining_and_the_second_that_of_the_last_round():
    method = make_method("fccl", pretrain_rounds=2)
    after = [run_method(method, rounds=rounds) for rounds in (1, 2, 3)]
    networks, states = zip(*((get_network(run, "silo 0"), run.clients.client_states["silo 0"]) for run in after))
    name = "classifier.1.weight"
    assert torch.equal(states[2][PRETRAINED_PREFIX + name], networks[1][name])
    assert torch.equal(states[2][PREVIOUS_PREFIX + name], networks[2][name])
    assert not torch.equal(networks[1][name], networks[2][name])
    assert [int(state[NUM_ROUNDS]) for state in states] == [1, 2, 3]


def test_a_teacher_equal_to_the_network_adds_nothing_and_another_one_its_divergence():
    method, batch = make_method("fccl", inter_weight=0.0), make_batch()
    net = build_model(method, replace(BATCH_NORM_MODEL, dropout=0.0)).double().eval()
    floats = {n: t for n, t in net.state_dict().items() if t.is_floating_point()}
    other = {n: t + 0.1 for n, t in floats.items()}

    def compute_loss(teacher, num_rounds):
        client_state = {PRETRAINED_PREFIX + n: t for n, t in teacher.items()} | {NUM_ROUNDS: torch.tensor(num_rounds)}
        return method.loss(bind_model(net, client_state=client_state), batch).item()

    assert compute_loss(floats, 1) == pytest.approx(compute_loss(floats, 0), abs=1e-9)
    assert compute_loss(other, 1) > compute_loss(other, 0) + 1e-3


@pytest.mark.parametrize("public", [None, make_public_images()[:1]])
def test_too_few_public_images_are_an_error_of_one_line(public):
    silos = [replace(silo, public=public) for silo in make_pattern_silos()]
    with pytest.raises(InputError, match="at least 2 public images; set public_images=<number>") as error:
        run_method(FCCL(), silos)
    assert "\n" not in str(error.value)


def test_silos_with_different_public_images_are_an_error():
    one, two, three = make_pattern_silos()
    with pytest.raises(InputError, match="silos silo 0 and silo 1 have different public images"):
        run_method(make_method("fccl"), [one, replace(two, public=two.public + 1), three])


def test_the_public_batches_are_the_same_at_every_silo():
    seen = []

    class Recorded(FCCL):
        def collaborative_loss(self, model, batch):
            seen.append(batch.y)
            assert torch.equal(batch.x, make_public_images()[batch.y])
            return super().collaborative_loss(model, batch)

    run_method(Recorded(rounds=2, iterations=1, mc_samples=2, local=make_method("fccl").local))
    first, second, third = (torch.cat(seen[i : i + 2]) for i in (0, 2, 4))
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    assert sorted(first.tolist()) == list(range(21))
    assert first.tolist() != list(range(21))


def test_teachers_do_not_change_while_a_silo_trains():
    run = run_method(make_method("fccl"), rounds=1)
    before = {n: t.clone() for n, t in run.clients.client_states["silo 0"].items() if n.startswith(PRETRAINED_PREFIX)}
    make_method("fccl").step(run.clients, run.server)
    after = {n: run.clients.client_states["silo 0"][n] for n in before}
    assert max_difference(before, after) == 0


def test_the_divergence_is_that_of_own_predictions_from_the_teachers():
    teacher, own = (normal(derive_key(name), (7, 5)).double() for name in ("teacher", "own"))
    expected = F.kl_div(own.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    assert kl_divergence(teacher, own).item() == pytest.approx(expected.item(), rel=1e-12)
    assert kl_divergence(own, teacher).item() != pytest.approx(expected.item(), rel=0.01)


def test_a_batch_of_one_is_refused():
    with pytest.raises(InputError, match=r"local.batch_size=1 must be at least 2"):
        make_method("fccl", local=LocalTraining(batch_size=1))


def test_logits_of_another_shape_than_before_are_left_out():
    method, state = make_method("fccl"), ServerState(("a", "b"), {}, torch.ones(2, 0, dtype=torch.bool))
    replies = [Reply("a", 1, extras={LOGITS: torch.ones(4, 3)}), Reply("b", 1, extras={LOGITS: torch.ones(2, 3)})]
    state = method.update_method_state(state, replies)
    assert state.method_state[LOGITS].shape == (4, 3)
    assert method.update_method_state(state, replies[1:]) is state
