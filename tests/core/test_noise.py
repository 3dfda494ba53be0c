"""Addressed noise has the right distribution and depends on its address alone.

Bounds on the statistics of draws are five to seven standard errors for the number of draws.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from uefl.core import noise
from uefl.core.noise import (
    Dropout,
    announce_noise_keys,
    derive_key,
    normal,
    permutation,
    random_bits,
    salt_noise_layers,
    sampling_mode,
    set_noise_key,
    uniform,
)


def test_the_same_address_gives_the_same_bits_and_another_gives_others():
    bits = random_bits(derive_key(0, "ada", 1, 2, "train"), 1000)
    assert torch.equal(bits, random_bits(derive_key(0, "ada", 1, 2, "train"), 1000))
    others = [(1, "ada", 1, 2, "train"), (0, "bob", 1, 2, "train"), (0, "ada", 2, 1, "train"), (0, "ada", 1, 2, "test")]
    for address in others:
        assert (bits == random_bits(derive_key(*address), 1000)).sum() < 5


def test_a_number_and_its_text_are_different_addresses():
    assert len({derive_key(1), derive_key("1"), derive_key(1.0), derive_key(1, 1), derive_key("1", 1)}) == 5


def test_a_short_draw_is_the_start_of_a_longer_one():
    assert torch.equal(random_bits(7, 10), random_bits(7, 1000)[:10])


def test_the_key_may_be_a_tensor():
    address = derive_key(3, "x")
    assert torch.equal(random_bits(address, 50), random_bits(torch.tensor(address), 50))


def test_few_numbers_have_the_bits_of_many(monkeypatch):
    """Numpy hashes few numbers, tensor operations many of them, those of several keys or under `vmap`."""
    keys = torch.tensor([0, 5, (1 << 63) - 1, *(derive_key("few", i) for i in range(20))])
    short = random_bits(keys[:, None], 100)
    assert all(torch.equal(row, random_bits(int(key), 100)) for row, key in zip(short, keys))
    assert torch.equal(short, vmap(lambda key: random_bits(key, 100))(keys))
    monkeypatch.setattr(noise, "_hash_in_numpy", None)
    assert torch.equal(short, random_bits(keys[:, None], 1 << 15)[:, :100])


def test_a_compiler_hashes_few_numbers_too():
    torch._dynamo.reset()
    key = torch.tensor(derive_key("c"))
    compiled = torch.compile(lambda key: random_bits(key, 100), backend="eager", fullgraph=True)
    assert torch.equal(compiled(key), random_bits(key, 100))


def test_the_global_generator_is_neither_read_nor_changed():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), normal(derive_key("n"), (20,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(normal(derive_key("n"), (20,)), first)


def test_uniform_draws_are_uniform():
    u = uniform(derive_key("u"), (1 << 22,))
    assert u.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)
    counts = torch.histc(u, 64, 0, 1)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum().item()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5


def test_the_largest_draw_is_less_than_one():
    """All 24 bits of draw 1539414 of this stream are set; half a step more would round to 1."""
    key, i = derive_key("ends", 9), 1539414
    assert (random_bits(key, i + 1)[i] >> 8) & 0xFFFFFF == 0xFFFFFF
    assert 1 - 1e-6 < uniform(key, (i + 1,))[i] < 1


def test_neighbouring_keys_and_counters_are_not_correlated():
    draws = torch.stack([uniform(k, (4096,)) for k in range(64)])
    for other in (draws.roll(1, 0), draws.roll(1, 1)):
        correlation = torch.corrcoef(torch.stack([draws.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.01


def test_normal_draws_are_normal():
    x = normal(derive_key("normal"), (3, 100_000)).flatten()
    assert x.mean().item() == pytest.approx(0, abs=0.01)
    assert x.std().item() == pytest.approx(1, abs=0.01)
    assert (x.abs() > 1.96).float().mean().item() == pytest.approx(0.05, abs=2e-3)


def test_a_compiler_does_not_replace_normal_draws():
    """Its own logarithms and cosines give other bits."""
    operations = []

    def backend(graph, _inputs):
        operations.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    key = torch.tensor(derive_key("k"))
    draws = torch.compile(lambda key: 2 * normal(key, (3, 1000)), backend=backend)(key)
    assert torch.equal(draws, 2 * normal(key, (3, 1000)))
    assert [name for name in operations if "normal" in name]
    assert not [name for name in operations if "log" in name or "cos" in name]


def test_a_permutation_has_every_index_once_and_is_uniform():
    assert torch.equal(permutation(3, 1000).sort().values, torch.arange(1000))
    firsts = torch.tensor([permutation(derive_key("p", i), 5)[0].item() for i in range(2000)])
    assert (torch.bincount(firsts, minlength=5) - 400).abs().max() < 100


def test_dropout_has_its_rate_and_keeps_the_mean():
    layer = Dropout(0.3)
    set_noise_key([layer], 5)
    y = layer(torch.ones(100_000))
    assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_under_vmap_has_the_bits_of_one_client_after_another(dtype):
    layer, x = Dropout(0.3), torch.randn(3, 20, 7).to(dtype)
    keys = torch.tensor([derive_key("client", i) for i in range(3)])
    stacked = vmap(lambda key, x: functional_call(layer, {"key": key}, (x,)))(keys, x)
    for key, one, expected in zip(keys, x, stacked):
        set_noise_key([layer], int(key))
        assert torch.equal(layer(one), expected)


def test_dropout_has_the_gradient_of_its_mask():
    layer, x = Dropout(0.3), torch.randn(5, 7, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.allclose(x.grad, (y != 0) / 0.7)


def make_step_draws(layer, keys, sizes):
    draws = []
    for key, n in zip(keys, sizes):
        set_noise_key([layer], key)
        draws.append(layer(torch.ones(n, 4)))
    return draws


@pytest.mark.parametrize("sizes", [(9, 9, 9, 2), (2, 9, 9, 9), (9000, 9, 9000, 9)])
def test_masks_of_announced_steps_equal_those_of_single_steps(sizes):
    keys, unannounced = [derive_key("step", i) for i in range(4)], derive_key("other")
    layer, single = (nn.Sequential(Dropout(0.5)) for _ in range(2))
    announce_noise_keys(salt_noise_layers(layer), keys)
    salt_noise_layers(single)
    order, sizes = [*keys, unannounced, keys[1]], [*sizes, 9, sizes[1]]
    for draw, expected in zip(make_step_draws(layer[0], order, sizes), make_step_draws(single[0], order, sizes)):
        assert torch.equal(draw, expected)


def test_masks_of_announced_steps_are_drawn_at_once_while_they_are_small(monkeypatch):
    layer, keys, numbers_of_keys = Dropout(0.5), [derive_key("step", i) for i in range(8)], []
    draw = noise.random_bits
    monkeypatch.setattr(noise, "random_bits", lambda key, n: (numbers_of_keys.append(len(key)), draw(key, n))[1])
    announce_noise_keys([layer], keys)
    make_step_draws(layer, keys, [16] * 8)
    assert numbers_of_keys == [8]
    make_step_draws(layer, keys, [(1 << 13) // 3] * 8)  # 2¹⁵ numbers: three masks at once
    assert numbers_of_keys == [8, 3, 3, 2]


def test_dropout_in_evaluation_mode_is_the_identity():
    x = torch.randn(10)
    assert torch.equal(Dropout(0.9).eval()(x), x)


def test_layers_of_one_network_have_different_draws():
    net = nn.Sequential(Dropout(0.5), Dropout(0.5))
    set_noise_key(salt_noise_layers(net), 1)
    x = torch.ones(1000)
    assert (net[0](x) == net[1](x)).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_the_key_is_not_in_the_state_dict():
    assert list(nn.Sequential(Dropout(0.5)).state_dict()) == []


def make_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Dropout(0.5), nn.Dropout(0.5), nn.AlphaDropout(0.5))


def test_in_sampling_mode_only_dropout_is_in_training_mode():
    net = make_layers().eval()
    with sampling_mode(net):
        assert [m.training for m in net] == [False, False, True, True, True]
    assert not any(m.training for m in net.modules())


def test_sampling_mode_restores_the_mode_of_every_layer_even_after_an_error():
    net = make_layers().eval()
    net[3].train()
    with pytest.raises(RuntimeError, match="on purpose"), sampling_mode(net):
        raise RuntimeError("on purpose")
    assert [m.training for m in net] == [False, False, False, True, False]


def test_batch_norm_does_not_change_in_sampling_mode():
    net = make_layers().eval()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    with sampling_mode(net):
        net(torch.randn(32, 4))
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
