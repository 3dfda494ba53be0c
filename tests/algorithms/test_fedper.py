"""FedPer: the classifier stays at the silo."""

import pytest
import torch
from harness import build_model, have_equal_bits, make_method, run_method

from uefl.models.model_config import ModelConfig


@pytest.mark.parametrize("codebook", [False, True])
def test_without_personal_layers_it_is_fedavg_bit_for_bit(codebook):
    fedper = run_method(make_method("fedper", personal_layers="none", codebook=codebook))
    fedavg = run_method(make_method("fedavg", codebook=codebook))
    assert have_equal_bits(fedper.server.model_state, fedavg.server.model_state)


@pytest.mark.parametrize(
    ("personal_layers", "layers"), [("classifier", {"classifier.1", "classifier.4"}), ("last", {"classifier.4"})]
)
@pytest.mark.parametrize("ensemble_size", [1, 2])
def test_personal_layers_stay_at_the_silo_and_differ(personal_layers, layers, ensemble_size):
    method = make_method("fedper", personal_layers=personal_layers)
    run = run_method(method, model=ModelConfig(width=4, depth=1, hidden_size=8, ensemble_size=ensemble_size))
    prefixes = [""] if ensemble_size == 1 else ["members.0.", "members.1."]
    names = {f"{p}{layer}.{leaf}" for p in prefixes for layer in layers for leaf in ("weight", "bias")}
    assert set(run.clients.client_states["silo 0"]) == names
    assert not names & (set(run.server.model_state) | run.clients.sent_names | run.clients.received_names)
    for name in names:
        assert not torch.equal(*(run.clients.client_states[f"silo {i}"][name] for i in (0, 1)))


def test_a_classifier_within_the_encoder_is_shared():
    net = build_model(make_method("fedper"))
    net.encoder.classifier = torch.nn.Linear(2, 2)
    assert not any(n.startswith("encoder.") for n in make_method("fedper").client_state_names(net))
