"""Addressed noise: what it is, and that its address is all it depends on."""

import pytest
import torch
from torch import nn

from uefl.noise import Dropout, bits, key, noises, normal, permutation, sampling, set_key, uniform


def test_the_same_address_gives_the_same_bits_and_another_gives_others():
    one = bits(key(0, "ada", 1, 2, "train"), 1000)
    assert torch.equal(one, bits(key(0, "ada", 1, 2, "train"), 1000))
    others = [(1, "ada", 1, 2, "train"), (0, "bob", 1, 2, "train"), (0, "ada", 2, 1, "train"), (0, "ada", 1, 2, "test")]
    for address in others:
        assert (one == bits(key(*address), 1000)).sum() < 5


def test_a_number_and_its_text_are_different_addresses():
    assert len({key(1), key("1"), key(1.0), key(1, 1), key("1", 1)}) == 5


def test_a_draw_is_the_beginning_of_a_longer_one():
    assert torch.equal(bits(7, 10), bits(7, 1000)[:10])


def test_the_key_may_be_a_tensor():
    address = key(3, "x")
    assert torch.equal(bits(address, 50), bits(torch.tensor(address), 50))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), normal(key("n"), (20,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(normal(key("n"), (20,)), first)


def test_uniform_draws_are_uniform():
    u = uniform(key("u"), (1 << 22,))
    assert u.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    counts = torch.histc(u, 64, 0, 1)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum().item()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5


def test_not_even_the_largest_draw_is_one():
    """All 24 bits of draw 1539414 of this stream are set, and half a step more is no float below 1."""
    k, at = key("ends", 9), 1539414
    assert (bits(k, at + 1)[at] >> 8) & 0xFFFFFF == 0xFFFFFF
    assert 1 - 1e-6 < uniform(k, (at + 1,))[at] < 1


def test_neighbouring_keys_and_counters_are_not_correlated():
    draws = torch.stack([uniform(k, (4096,)) for k in range(64)])
    for other in (draws.roll(1, 0), draws.roll(1, 1)):
        both = torch.corrcoef(torch.stack([draws.flatten(), other.flatten()]))[0, 1]
        assert abs(both) < 0.01


def test_normal_draws_are_normal():
    x = normal(key("normal"), (3, 100_000)).flatten()
    assert x.mean().item() == pytest.approx(0, abs=0.01)
    assert x.std().item() == pytest.approx(1, abs=0.01)
    assert (x.abs() > 1.96).float().mean().item() == pytest.approx(0.05, abs=2e-3)


def test_a_compiler_leaves_normal_draws_to_torch():
    """Its own logarithms and cosines end in other bits."""
    seen = []

    def backend(graph, _inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    k = torch.tensor(key("k"))
    found = torch.compile(lambda k: 2 * normal(k, (3, 1000)), backend=backend)(k)
    assert torch.equal(found, 2 * normal(k, (3, 1000)))
    assert [name for name in seen if "normal" in name]
    assert not [name for name in seen if "log" in name or "cos" in name]


def test_a_permutation_holds_everything_once_and_favours_no_place():
    assert torch.equal(permutation(3, 1000).sort().values, torch.arange(1000))
    firsts = torch.tensor([permutation(key("p", i), 5)[0].item() for i in range(2000)])
    assert (torch.bincount(firsts, minlength=5) - 400).abs().max() < 100


def test_dropout_drops_its_share_and_keeps_the_mean():
    layer = Dropout(0.3)
    set_key([layer], 5)
    y = layer(torch.ones(100_000))
    assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_dropout_out_of_training_is_the_identity():
    x = torch.randn(10)
    assert torch.equal(Dropout(0.9).eval()(x), x)


def test_layers_of_one_network_draw_apart():
    net = nn.Sequential(Dropout(0.5), Dropout(0.5))
    set_key(noises(net), 1)
    x = torch.ones(1000)
    assert (net[0](x) == net[1](x)).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_the_key_never_travels():
    assert list(nn.Sequential(Dropout(0.5)).state_dict()) == []


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Dropout(0.5), nn.Dropout(0.5), nn.AlphaDropout(0.5))


def test_while_sampling_only_dropout_is_in_training_mode():
    net = layers().eval()
    with sampling(net):
        assert [m.training for m in net] == [False, False, True, True, True]
    assert not any(m.training for m in net.modules())


def test_sampling_gives_every_layer_its_own_mode_back_even_after_an_error():
    net = layers().eval()
    net[3].train()
    with pytest.raises(RuntimeError, match="on purpose"), sampling(net):
        raise RuntimeError("on purpose")
    assert [m.training for m in net] == [False, False, False, True, False]


def test_batch_norm_does_not_move_while_sampling():
    net = layers().eval()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with sampling(net):
        net(torch.randn(32, 4))
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
