"""Group rounds of UEFL: in the last rounds of a run, alike silos train one model together, and keep it."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from harness import (
    LOCAL,
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
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.group_models import get_group_model, list_groups
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.federation import Examples, Silo, is_codeword_tensor
from uefl.engines.serial import SerialEngine
from uefl.engines.stacked.stacked_engine import StackedEngine

BRIGHTNESS = {"ada": 0.0, "bob": 4.0, "cyd": 0.0, "dan": 4.0, "eve": 0.0}
GROUPS = [("ada", "cyd", "eve"), ("bob", "dan")]
SHARED, GROUP = 5, 2  # rounds with one model, with a decision after the third, and rounds in groups


def make_silos(brightness=BRIGHTNESS):
    """Return silos with dark and with bright images, of different sizes; `domain` is the same for all."""
    return [
        Silo(name, *(make_pattern_examples(n, 10 * i + j, value) for j, n in enumerate((50 + 5 * i, 9, 9))))
        for i, (name, value) in enumerate(brightness.items())
    ]


def make_group_method(**fields):
    codebook = replace(SMALL_CODEBOOK, segments=1, num_codewords=24)
    return UEFL(**{**SHORT_RUN, "iterations": 3, "codebook": codebook, "group_rounds": GROUP, **fields})


def run_groups(method, silos=None, **settings):
    clients = make_clients(method, silos or make_silos(), feature_norm="none", **settings)
    server, records = run_rounds(method, clients)
    return server, records, clients


def get_weights(clients, name):
    names = [n for n in clients.net.state_dict() if not is_codeword_tensor(n)]
    return {n: clients.client_states[name][n] for n in names}


class RecordingEngine(SerialEngine):
    """The serial engine with all training messages and replies."""

    replies = ()

    def fit(self, method, broadcast, *, evaluate=True):
        for reply in super().fit(method, broadcast, evaluate=evaluate):
            self.replies = (*self.replies, (broadcast, reply))
            yield reply


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "extra_rounds", "iterations", "group_rounds", "shared_rounds"),
    [(5, 3, 3, 0, 11), (5, 3, 3, 3, 8), (5, 3, 3, 4, 7), (5, 7, 2, 4, 8), (5, 3, 3, 99, 5), (5, 3, 1, 3, 5)],
)
def test_groups_train_in_the_last_rounds_but_never_in_the_first_iteration(
    rounds, extra_rounds, iterations, group_rounds, shared_rounds
):
    budget = {"rounds": rounds, "extra_rounds": extra_rounds, "iterations": iterations}
    method = UEFL(**budget, group_rounds=group_rounds)
    assert method.total_rounds == FedAvg(**budget).total_rounds, "equal in every comparison"
    assert method.shared_rounds == shared_rounds
    assert method.has_own_models == (shared_rounds < method.total_rounds)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_schedule_covers_the_shared_rounds_and_then_half_the_rate_falls_to_zero(schedule):
    method = UEFL(rounds=5, extra_rounds=3, iterations=3, group_rounds=4, local=replace(LOCAL, schedule=schedule))
    shared = [method.local.lr_at(r, 7) for r in range(1, 8)]
    in_groups = [method.local.lr / 2 * share for share in (1, 0.75, 0.5, 0.25)]
    assert [method.lr_at(r) for r in range(1, 12)] == shared + in_groups
    plain = replace(method, group_rounds=0)
    assert [plain.lr_at(r) for r in range(1, 13)] == [plain.local.lr_at(r, 11) for r in range(1, 13)]


def test_further_rounds_of_a_finished_run_end_with_as_many_in_groups():
    method = make_group_method().add_rounds(4)
    assert (method.shared_rounds, method.total_rounds) == (SHARED + GROUP + 4, SHARED + GROUP + 4 + GROUP)
    plain = make_group_method(group_rounds=0).add_rounds(4)
    assert plain.shared_rounds == plain.total_rounds == SHARED + GROUP + 4


def test_shared_rounds_and_decisions_are_those_of_a_run_that_ends_with_them():
    server, records, _ = run_groups(make_group_method())
    plain, plain_records, _ = run_groups(make_group_method(group_rounds=0, iterations=2))
    assert have_equal_bits(server.model_state, plain.model_state)
    assert torch.equal(server.access, plain.access)
    assert [r["round"] for r in records] == [*range(1, SHARED + GROUP + 1)]
    assert [r["round"] for r in records if r.get("has_decision")] == [3]
    assert [drop_seconds(r) for r in records[: SHARED - 1]] == [drop_seconds(r) for r in plain_records[:-1]]
    costs = ("bytes_up", "bytes_down", "kmeans_seconds")
    last_shared, last = (
        {n: v for n, v in drop_seconds(r).items() if n not in costs} for r in (records[SHARED - 1], plain_records[-1])
    )
    assert last_shared == last
    assert records[SHARED - 1]["bytes_up"] > records[0]["bytes_up"], "centroids of halves count"


def test_the_level_of_the_test_is_divided_by_the_decisions_before_the_group_rounds():
    codebook = replace(make_group_method().codebook, uncertainty_test="permutation")
    levels = {}
    for iterations, group_rounds in ((2, 0), (3, 2), (3, 1), (3, 0)):
        method = make_group_method(codebook=codebook, iterations=iterations, group_rounds=group_rounds)
        _, records = run_rounds(method, make_clients(method, make_silos(), feature_norm="none"), 3)
        levels[iterations, group_rounds] = records[-1]["decision"]["level_per_decision"]
    assert levels == {(2, 0): 0.05, (3, 2): 0.05, (3, 1): 0.025, (3, 0): 0.025}


@pytest.mark.parametrize("group_rounds", [2, 3])  # the last iteration, and one round more
def test_codewords_are_validated_for_the_last_time_before_the_first_group_round(group_rounds):
    codebook = replace(make_group_method().codebook, extend="validated")
    _, records, _ = run_groups(make_group_method(codebook=codebook, group_rounds=group_rounds))
    validated = [r["round"] for r in records if any("revoked_codewords" in silo for silo in r["silos"].values())]
    assert validated == [SHARED + GROUP - group_rounds]


# --- groups -----------------------------------------------------------------------------------------------------------


def test_alike_silos_end_with_one_model():
    server, records, clients = run_groups(make_group_method())
    assert [r.get("groups") for r in records] == [None] * SHARED + [GROUPS] * GROUP
    assert list_groups(server) == GROUPS
    assert not any(is_codeword_tensor(name) for name in server.method_state), "codewords are those of the shared model"
    for i, group in enumerate(GROUPS):
        model = {n: t for n, t in get_group_model(server, i).items() if not is_codeword_tensor(n)}
        assert all(have_equal_bits(get_weights(clients, name), model) for name in group)
    assert max_difference(get_weights(clients, "ada"), get_weights(clients, "bob")) > 1e-3


@pytest.mark.parametrize("weights", ["num_examples", "uniform"])
def test_a_group_round_is_the_average_of_its_silos(weights):
    method = make_group_method(group_rounds=1, aggregation_weights=weights)
    server, records, clients = run_groups(method, engine=RecordingEngine)
    sent = [(b, r) for b, r in clients.replies if b.round == server.round and not b.is_personal]
    assert [r.silo_name for _, r in sent] == [name for group in GROUPS for name in group]
    assert {b.lr for b, _ in sent} == {method.local.lr / 2}
    assert records[-1]["bytes_up"] == sum(r.sent_bytes for _, r in sent)
    for group in GROUPS:
        replies = [r for _, r in sent if r.silo_name in group]
        shares = [r.num_examples if weights == "num_examples" else 1 for r in replies]
        for name, value in get_weights(clients, group[0]).items():
            if value.is_floating_point():
                mean = sum(n / sum(shares) * r.tensors[name].double() for n, r in zip(shares, replies))
                assert torch.allclose(value.double(), mean, atol=1e-6)
        codewords = [n for n in server.model_state if is_codeword_tensor(n)]
        for reply in replies:
            row = server.access[server.silo_names.index(reply.silo_name)]
            assert all(torch.equal(reply.tensors[n], server.model_state[n][row]) for n in codewords)


def test_one_group_of_all_silos_continues_with_the_shared_model(monkeypatch):
    """FedAvg's round at the rates of group rounds, without an update of codewords, gives the same bits."""
    monkeypatch.setattr(extensible_codebook, "group_by_halves", lambda halves: [tuple(halves)])
    server, _, clients = run_groups(make_group_method())
    longer = make_group_method()
    other = make_clients(longer, make_silos(), feature_norm="none")
    state, _ = run_rounds(longer, other, SHARED)
    for i in range(GROUP):
        broadcast = longer.make_broadcast(other, state)._replace(
            round=SHARED + 1 + i, participants=state.silo_names, lr=longer.local.lr / 2 * (1 - i / GROUP)
        )
        model_state, _ = FedAvg.average_replies(longer, other, state, broadcast, evaluate=False)
        codewords = {n: t for n, t in state.model_state.items() if is_codeword_tensor(n)}
        state = state.replace(model_state={**model_state, **codewords})
    weights = {n: t for n, t in state.model_state.items() if not is_codeword_tensor(n)}
    assert have_equal_bits(get_weights(clients, "ada"), weights)
    assert list_groups(server) == [tuple(BRIGHTNESS)]


@pytest.mark.parametrize("evaluate_every", [1, 1000])
def test_records_of_group_rounds_have_metrics_of_the_groups_and_of_the_shared_model(evaluate_every):
    method = make_group_method(evaluate_every=evaluate_every)
    _, records, _ = run_groups(method)
    _, plain, _ = run_groups(replace(method, group_rounds=0, iterations=2))
    assert not any("shared" in silo for r in records[:SHARED] for silo in r["silos"].values())
    evaluated = [all("nll" in silo for silo in r["silos"].values()) for r in records]
    assert evaluated[SHARED - 1]
    assert evaluated[-1]
    assert evaluated[SHARED] == (evaluate_every == 1)
    for name, entry in plain[-1]["silos"].items():
        for record in records[SHARED:]:
            shared = record["silos"][name]["shared"]
            assert {"test": shared["nll"], **shared["validation"]} == {"test": entry["nll"], **entry["validation"]}
            assert shared["nll"] != record["silos"][name].get("nll")
            assert not {"bytes_up", "num_codewords", "local_accuracy"} & shared.keys()


def test_a_silo_without_training_data_keeps_the_shared_model():
    *silos, last = make_silos()
    silos.append(replace(last, train=Examples(last.train.x[:0], last.train.y[:0])))
    method = make_group_method(mc_samples=1)
    server, records, clients = run_groups(method, silos)
    assert list_groups(server) == [("ada", "cyd"), ("bob", "dan")]
    assert "eve" not in clients.client_states
    (broadcast,) = (b for b in method.make_broadcasts(clients, server) if "eve" in b.participants)
    assert broadcast.participants == ("eve",)
    assert have_equal_bits(broadcast.model_state, server.model_state)
    assert "shared" not in records[-1]["silos"]["eve"]
    assert "nll" in records[-1]["silos"]["eve"]


def test_with_few_clients_per_round_a_group_trains_those_that_take_part():
    _, records, clients = run_groups(make_group_method(clients_per_round=2), engine=RecordingEngine)
    for record in records[SHARED:]:
        sent = {r.silo_name for b, r in clients.replies if b.round == record["round"] and not b.is_personal}
        assert sorted(sent) == record["participants"]
        assert len(sent) == 2
        assert all("nll" in silo and "shared" in silo for silo in record["silos"].values())


class FailingEngine(SerialEngine):
    """The serial engine, whose silo ada sends weights that are not finite in group rounds, as does all of a group."""

    failing = ("ada",)

    def fit(self, method, broadcast, *, evaluate=True):
        for reply in super().fit(method, broadcast, evaluate=evaluate):
            if broadcast.round > SHARED and reply.silo_name in self.failing and not broadcast.is_personal:
                reply = reply._replace(tensors={n: t * float("nan") for n, t in reply.tensors.items()})
            yield reply


@pytest.mark.parametrize("failing", [("ada",), GROUPS[1]])
def test_a_reply_that_is_not_finite_is_left_out_of_its_group(failing, monkeypatch):
    monkeypatch.setattr(FailingEngine, "failing", failing)
    server, records, clients = run_groups(make_group_method(), engine=FailingEngine)
    whole, _, _ = run_groups(make_group_method())
    assert all("is not finite" in records[-1]["silos"][name]["rejected"] for name in failing)
    models, expected = ([get_group_model(s, i) for i in (0, 1)] for s in (server, whole))
    failed = 0 if failing == ("ada",) else 1
    assert have_equal_bits(models[1 - failed], expected[1 - failed]), "the other group is not affected"
    assert not have_equal_bits(models[failed], expected[failed])
    if failed:
        assert have_equal_bits(models[failed], server.model_state), "without a reply, a group keeps its model"
    assert all(torch.isfinite(t).all() for state in clients.client_states.values() for t in state.values())


def test_local_fine_tuning_follows_the_group_rounds():
    _, grouped, clients = run_groups(make_group_method())
    _, tuned, tuned_clients = run_groups(make_group_method(fine_tuning_epochs=1))
    assert [drop_seconds(r) for r in tuned[:-1]] == [drop_seconds(r) for r in grouped[:-1]]
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
    silos = make_silos({"ada": 0.0, "bob": 4.0, "cyd": 0.0, "dan": -4.0})
    _, records, clients = run_groups(make_group_method(), silos)
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
