import pytest
import torch
import torch.nn.functional as F
from federations import NORMED, PLAIN, batch, method, model_of, network, run, silos
from torch.distributions import Normal, kl_divergence

from uefl.algorithms.fedcr import DEVIATION, HEAD, MEAN, product
from uefl.federation import Part


def test_the_product_of_two_unit_gaussians_and_the_standard_one_has_precision_3():
    found = product(torch.tensor([[2.0]]), torch.tensor([[1.0 + 4.0]]))
    assert float(found.deviation**-2) == pytest.approx(3)
    assert float(found.mean) == pytest.approx(5 / 3)


def test_the_loss_takes_the_prior_as_the_first_argument():
    of, b = method("fedcr", beta=0.1, train_draws=1), batch()
    net = network(of, PLAIN).double().eval()
    sent = {MEAN: torch.randn(3, 8).double(), DEVIATION: torch.rand(3, 8).double() + 0.1}
    q = net.classifier.posterior(net.features(b.x))
    prior = Normal(sent[MEAN][b.y], sent[DEVIATION][b.y])
    close = kl_divergence(prior, Normal(q.mean, q.deviation)).sum(-1).mean()
    expected = F.cross_entropy(net.classifier.head(q.mean), b.y) + 0.1 * close
    assert torch.allclose(of.loss(model_of(net, sent=sent), b), expected, atol=1e-12)


def test_without_prior_and_with_one_draw_it_is_a_personal_head_on_noisy_features():
    """FedPer: the same network, FedAvg's loss, the head kept; all rounds but the last, which is for heads."""
    of = method("fedcr", beta=0.0, train_draws=1, rounds=3)
    per = method("fedavg", rounds=3)

    class FedPer(type(per)):
        def keeps(self, net):
            return of.keeps(net)

    per = FedPer(rounds=3, extra_rounds=1, iterations=2, passes=3, local=of.local)
    a, b = run(of, rounds=3), run(per, net=network(of), rounds=3)
    for name, tensor in b.server.state.items():
        assert torch.allclose(a.server.state[name], tensor, atol=1e-6)


def test_a_silo_sends_the_product_of_its_codes_class_by_class():
    of = method("fedcr")
    net = network(of, PLAIN).double().eval()
    part = Part(batch().x, torch.arange(12) % 2)  # nobody has class 2
    model = model_of(net, sent={MEAN: torch.zeros(3, 8).double(), DEVIATION: torch.ones(3, 8).double()})
    with torch.no_grad():
        extra, _ = of.finish(model, part, steps=1, rate=0.1)
        q = net.classifier.posterior(net.features(part.x))
    for c in (0, 1):
        mine = part.y == c
        assert torch.allclose(extra["precision"][c], q.deviation[mine].pow(-2).sum(0))
        assert torch.allclose(extra["shift"][c], (q.mean[mine] / q.deviation[mine] ** 2).sum(0))
    assert extra["precision"][2].abs().sum() == 0


def test_a_class_nobody_had_keeps_its_prior():
    few = [s.__class__(s.name, Part(s.train.x[s.train.y < 2], s.train.y[s.train.y < 2]), *rest(s)) for s in silos()]
    memory = run(method("fedcr"), few).server.memory
    assert torch.equal(memory[MEAN][2], torch.zeros(8))
    assert torch.equal(memory[DEVIATION][2], torch.ones(8))
    assert (memory[DEVIATION][:2] < 1).all()


def rest(silo):
    return silo.validation, silo.test, silo.domain


def test_the_last_round_is_for_all_heads_and_no_body():
    of = method("fedcr", participation=1)
    before, after = run(of, model=NORMED, rounds=of.budget - 1), run(of, model=NORMED)
    assert all(torch.equal(before.server.state[n], t) for n, t in after.server.state.items())
    assert after.records[-1]["who"] == ["silo 0", "silo 1", "silo 2"]
    head = f"{HEAD}1.weight"
    assert len({float(mine[head].sum()) for mine in after.clients.memory.values()}) == 3


def test_gradients_are_clipped_at_norm_10():
    of, model = method("fedcr"), model_of(network(method("fedcr"), PLAIN))
    small, large = {"a": torch.ones(4), "b": torch.ones(5)}, {"a": torch.full((4,), 50.0), "b": torch.full((5,), 50.0)}
    assert all(torch.equal(of.adjust(model, small)[n], small[n]) for n in small)
    assert torch.cat(list(of.adjust(model, large).values())).norm() == pytest.approx(10, rel=1e-4)
