import pytest
import torch
import torch.nn.functional as F
from federations import NORMED, PLAIN, batch, method, model_of, network, run, same, silos

from uefl.algorithms.fediir import MEAN, gradient


@pytest.mark.parametrize("model", [PLAIN, NORMED], ids=["mlp", "batch norm"])
@pytest.mark.parametrize("participation", [0, 2])
def test_without_its_penalty_it_is_fedavg_bit_for_bit(model, participation):
    a = run(method("fediir", penalty=0.0, participation=participation), model=model)
    b = run(method("fedavg", participation=participation), model=model)
    assert same(a.server.state, b.server.state)


def test_the_running_mean_begins_at_a_twentieth_of_the_mean_gradient():
    of = method("fediir")
    memory = run(of, rounds=1, model=PLAIN, dtype=torch.float64).server.memory
    net = network(of, PLAIN).double().eval()
    everything = [torch.cat([getattr(s.train, f) for s in silos()]) for f in ("x", "y")]
    loss = F.cross_entropy(net(everything[0].double()).logits[0], everything[1])
    head = {n: p for n, p in net.named_parameters() if n.startswith("classifier.")}
    for name, g in zip(head, torch.autograd.grad(loss, list(head.values()))):
        assert torch.allclose(memory[MEAN + name], 0.05 * g, atol=1e-12)


def test_the_penalty_is_the_squared_distance_of_gradients():
    of, b = method("fediir", penalty=0.5), batch()
    net = network(of, PLAIN).double().eval()
    names = [n for n, _ in net.named_parameters() if n.startswith("classifier.")]
    sent = {MEAN + n: torch.full_like(net.get_parameter(n), 0.01) for n in names}
    model = model_of(net, sent=sent)
    task = F.cross_entropy(net(b.x).logits[0], b.y)
    g = torch.autograd.grad(task, [net.get_parameter(n) for n in names])
    expected = task + 0.5 * sum((t - 0.01).square().sum() for t in g)
    assert torch.allclose(of.loss(model, b), expected, atol=1e-12)


def test_the_encoder_feels_the_penalty():
    of, b = method("fediir", penalty=1.0), batch()
    net = network(of, PLAIN).double().eval()
    weight = net.encoder.layers[1].weight

    def penalty():
        g, _ = gradient(model_of(net), b)
        return sum(t.square().sum() for t in g.values())

    (found,) = torch.autograd.grad(penalty(), weight)
    with torch.no_grad():
        weight[0, 0] += 1e-5
        above = penalty()
        weight[0, 0] -= 2e-5
        below = penalty()
    assert float(found[0, 0]) == pytest.approx(float(above - below) / 2e-5, rel=1e-3, abs=1e-9)


def test_it_takes_two_messages_a_round_and_counts_both():
    a, b = (run(method(name)).records[0] for name in ("fediir", "fedavg"))
    assert a["bytes_up"] > b["bytes_up"]
    assert a["bytes_down"] > 2 * b["bytes_down"]
