import torch
from federations import method, network, run
from torch import nn

from uefl.experiment import Architecture


def test_silos_of_different_brightness_keep_different_statistics():
    done = run(method("fedbn"))
    norm = "encoder.blocks.0.0.norm1."
    for leaf in ("weight", "bias", "running_mean", "running_var"):
        bright, dark = (done.clients.memory[f"silo {i}"][norm + leaf] for i in (0, 2))
        assert not torch.equal(bright, dark)


def test_norms_are_found_by_type():
    of = method("fedbn")
    net = network(of, Architecture(encoder="resnet18-cifar", hidden=8), (3, 32, 32))
    kept = of.keeps(net)
    assert any("downsample" in n or "shortcut" in n for n in kept)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(kept) == 5 * len(norms)


def test_without_batch_norm_it_is_fedavg():
    assert not method("fedbn").keeps(network(method("fedbn"), Architecture(encoder="gn-conv", hidden=8), (1, 8, 8)))
