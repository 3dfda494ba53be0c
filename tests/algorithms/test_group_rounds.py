"""Group rounds of UEFL: alike silos train one model together after the last round, and keep it."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from harness import (
    SHORT_RUN,
    SMALL_CODEBOOK,
    TINY_SETTINGS,
    call_cli,
    drop_seconds,
    have_equal_bits,
    make_clients,
    make_pattern_examples,
    max_difference,
    run_rounds,
)

from uefl.algorithms import extensible_codebook
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.federation import Silo, is_codeword_tensor
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

BRIGHTNESS = {"ada": 0.0, "bob": 4.0, "cyd": 0.0, "dan": 4.0, "eve": 0.0}
GROUPS = [("ada", "cyd", "eve"), ("bob", "dan")]


def make_silos():
    """Return silos with dark and with bright images, of different sizes; `domain` is the same for all."""
    return [
        Silo(name, *(make_pattern_examples(n, 10 * i + j, brightness) for j, n in enumerate((50 + 5 * i, 9, 9))))
        for i, (name, brightness) in enumerate(BRIGHTNESS.items())
    ]


def make_group_method(**fields):
    codebook = replace(SMALL_CODEBOOK, segments=1, num_codewords=24)
    return UEFL(**{**SHORT_RUN, "codebook": codebook, "group_rounds": 2, **fields})


def run_groups(method, **settings):
    clients = make_clients(method, make_silos(), feature_norm="none", **settings)
    server, records = run_rounds(method, clients)
    return server, records, clients


def get_weights(clients, name):
    names = [n for n in clients.net.state_dict() if not is_codeword_tensor(n)]
    return {n: clients.client_states[name][n] for n in names}


def test_alike_silos_end_with_one_model_and_nothing_shared_moves():
    server, records, clients = run_groups(make_group_method())
    assert records[-1]["groups"] == GROUPS
    for group in GROUPS:
        assert all(have_equal_bits(get_weights(clients, group[0]), get_weights(clients, name)) for name in group)
    assert max_difference(get_weights(clients, "ada"), get_weights(clients, "bob")) > 1e-3
    plain, plain_records, _ = run_groups(make_group_method(group_rounds=0))
    assert have_equal_bits(server.model_state, plain.model_state)
    assert [drop_seconds(r) for r in records[:-1]] == [drop_seconds(r) for r in plain_records[:-1]]
    assert records[-1]["bytes_up"] > plain_records[-1]["bytes_up"], "centroids and weights of the group rounds count"


def test_a_group_round_is_the_average_of_its_silos_by_their_examples():
    class RecordingEngine(SerialEngine):
        replies = ()

        def fit(self, method, broadcast, *, evaluate=True):
            for reply in super().fit(method, broadcast, evaluate=evaluate):
                self.replies = (*self.replies, (broadcast, reply))
                yield reply

    method = make_group_method(group_rounds=1)
    server, _, clients = run_groups(method, engine=RecordingEngine)
    sent = [(b, r) for b, r in clients.replies if b.round > server.round and not b.is_personal]
    assert [r.silo_name for _, r in sent] == [name for group in GROUPS for name in group]
    assert {b.lr for b, _ in sent} == {method.local.lr / 2}
    for group in GROUPS:
        replies = [r for _, r in sent if r.silo_name in group]
        total = sum(r.num_examples for r in replies)
        for name, value in get_weights(clients, group[0]).items():
            if value.is_floating_point():
                mean = sum(r.num_examples / total * r.tensors[name].double() for r in replies)
                assert torch.allclose(value.double(), mean, atol=1e-6)
        codewords = [n for n in server.model_state if is_codeword_tensor(n)]
        for reply in replies:
            row = server.access[server.silo_names.index(reply.silo_name)]
            assert all(torch.equal(reply.tensors[n], server.model_state[n][row]) for n in codewords)


def test_local_fine_tuning_follows_the_group_rounds():
    _, grouped, clients = run_groups(make_group_method())
    _, tuned, tuned_clients = run_groups(make_group_method(fine_tuning_epochs=1))
    assert tuned[-1]["groups"] == grouped[-1]["groups"]
    assert max_difference(get_weights(tuned_clients, "ada"), get_weights(tuned_clients, "cyd")) > 0
    assert max_difference(get_weights(tuned_clients, "ada"), get_weights(clients, "ada")) > 0


def test_engines_agree():
    results = [run_groups(make_group_method(), engine=e, dtype=torch.float64) for e in (SerialEngine, StackedEngine)]
    (_, records, clients), (_, others, other_clients) = results
    for name in BRIGHTNESS:
        assert max_difference(get_weights(clients, name), get_weights(other_clients, name)) < 1e-9
    means = [fmean(silo["nll"] for silo in r[-1]["silos"].values()) for r in (records, others)]
    assert means[0] == pytest.approx(means[1], rel=1e-9)


def test_groups_need_a_codebook():
    with pytest.raises(InputError, match="group_rounds=2 needs a codebook, whose centroids find the groups"):
        make_group_method(codebook=None)


def test_a_run_names_its_groups_and_predicts_with_their_models(tmp_path):
    answer = call_cli("run", "uefl", *TINY_SETTINGS, "group_rounds=1", "--out", str(tmp_path))
    assert answer.code == 0
    text = " ".join(answer.stdout.split())
    assert "after the last shared round, groups of alike silos trained one model each: D1-1" in text


def test_silos_alike_to_no_other_train_one_model_together():
    brightness = {"ada": 0.0, "bob": 4.0, "cyd": 0.0, "dan": -4.0}
    silos = [
        Silo(name, *(make_pattern_examples(n, 10 * i + j, value) for j, n in enumerate((60, 9, 9))))
        for i, (name, value) in enumerate(brightness.items())
    ]
    method = make_group_method()
    clients = make_clients(method, silos, feature_norm="none")
    _, records = run_rounds(method, clients)
    assert records[-1]["groups"] == [("ada", "cyd"), ("bob", "dan")]
    assert records[-1]["unlike_silos"] == ("bob", "dan")
    assert have_equal_bits(get_weights(clients, "bob"), get_weights(clients, "dan"))


def test_with_the_earlier_rule_silos_alike_to_no_other_train_alone(monkeypatch):
    monkeypatch.setattr(extensible_codebook, "group_by_spacing", lambda centroids: [(name,) for name in centroids])
    codebook = replace(make_group_method().codebook, alike_rule="spacing")
    _, records, clients = run_groups(make_group_method(codebook=codebook))
    assert records[-1]["groups"] == [(name,) for name in BRIGHTNESS]
    assert records[-1]["unlike_silos"] == ()
    assert not have_equal_bits(get_weights(clients, "ada"), get_weights(clients, "cyd"))
