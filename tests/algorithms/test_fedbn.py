"""FedBN: batch norm stays at the silo."""

import pytest
import torch
from harness import build_model, have_equal_bits, make_method, make_pattern_silos, run_method
from torch import nn

from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.models.model_config import ModelConfig


def test_silos_of_different_brightness_have_different_batch_norm():
    client_states = run_method(make_method("fedbn")).clients.client_states
    layer = "encoder.blocks.0.0.norm1."
    for tensor_name in ("weight", "bias", "running_mean", "running_var"):
        dark, bright = (client_states[f"silo {i}"][layer + tensor_name] for i in (0, 2))
        assert not torch.equal(dark, bright)


def test_batch_norm_layers_are_found_by_type():
    method = make_method("fedbn")
    net = build_model(method, ModelConfig(encoder="resnet18-cifar", hidden_size=8), (3, 32, 32))
    names = method.client_state_names(net)
    assert any("downsample" in n or "shortcut" in n for n in names)
    layers = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(names) == 5 * len(layers)


def test_nothing_stays_at_the_silo_without_batch_norm():
    method = make_method("fedbn")
    net = build_model(method, ModelConfig(encoder="group-norm-conv", hidden_size=8), (1, 8, 8))
    assert not method.client_state_names(net)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (make_method("fedavg", batch_norm="personal"), make_method("fedbn")),
        (make_method("uefl", batch_norm="personal", codebook=True), make_method("fedbn", codebook=True)),
    ],
    ids=["fedavg", "uefl"],
)
def test_personal_batch_norm_is_fedbn_bit_by_bit(one, other):
    (server, clients, records), (other_server, other_clients, other_records) = run_method(one), run_method(other)
    assert have_equal_bits(server.model_state, other_server.model_state)
    assert torch.equal(server.access, other_server.access)
    assert [r["silos"]["silo 1"]["entropy"] for r in records] == [
        r["silos"]["silo 1"]["entropy"] for r in other_records
    ]
    for name, client_state in clients.client_states.items():
        assert have_equal_bits(client_state, other_clients.client_states[name])
    assert "encoder.blocks.0.0.norm1.weight" in clients.client_states["silo 0"]
    assert not any("norm1" in n for n in clients.sent_names)


def test_fedbn_has_no_other_batch_norm():
    with pytest.raises(InputError, match="batch_norm=local: FedBN is batch_norm=personal; use fedavg"):
        make_method("fedbn", batch_norm="local")


def test_silo_without_training_data_cannot_have_a_batch_norm_of_its_own():
    silos = make_pattern_silos()
    silos[1] = type(silos[1])("empty", Examples(silos[1].train.x[:0], silos[1].train.y[:0]), *[silos[1].test] * 2)
    with pytest.raises(InputError, match="batch_norm=personal gives every silo its own batch norm, but empty has no"):
        make_method("fedavg", batch_norm="personal").prepare_silos(silos)
