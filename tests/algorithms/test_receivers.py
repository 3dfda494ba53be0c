"""Which silos get codewords (`extend`), and which of them lose them again by validation."""

from dataclasses import replace

import pytest
import torch
from harness import SHORT_RUN, SMALL_CODEBOOK, have_equal_bits, make_clients, make_striped_silos, run_rounds

from uefl.algorithms import codeword_validation
from uefl.algorithms.codeword_validation import UNVALIDATED_FROM, revoke_useless_codewords
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.uefl import UEFL
from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.federation import Examples
from uefl.core.metrics import compute_metrics
from uefl.core.noise import derive_key, permutation
from uefl.experiment.settings import from_dict

SILO_NAMES = ("ada", "bob", "cyd", "dan")


def make_uefl(extend, **fields):
    codebook = replace(SMALL_CODEBOOK, extend=extend, **fields.pop("codebook", {}))
    return UEFL(**{**SHORT_RUN, **fields}, codebook=codebook)


def run(extend, **fields):
    method = make_uefl(extend, **fields)
    return run_rounds(method, make_clients(method))


def list_receivers(record):
    return [name for name, silo in record["silos"].items() if silo.get("new_codewords")]


@pytest.mark.parametrize("value", [True, False])
def test_the_old_values_are_refused_with_the_new_ones(value):
    message = f"extend={str(value).lower()}; allowed: none, uncertain, all, random, validated"
    with pytest.raises(InputError, match=message):
        ExtensibleCodebook(extend=value)
    with pytest.raises(InputError, match=message):  # as a run folder of an earlier version has it
        from_dict(ExtensibleCodebook, {"extend": value})


def test_all_silos_with_training_data_get_codewords_at_every_decision():
    empty = Examples(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    silos = [replace(s, train=empty) if s.name == "dan" else s for s in make_striped_silos()]
    method = make_uefl("all", iterations=3, codebook={"gamma": 1e9})  # none is uncertain
    server, records = run_rounds(method, make_clients(method, silos))
    assert [list_receivers(r) for r in records] == [[], [], ["ada", "bob", "cyd"], [], ["ada", "bob", "cyd"], [], []]
    assert dict(zip(server.silo_names, server.access.sum(1).tolist())) == {"ada": 18, "bob": 18, "cyd": 18, "dan": 6}
    assert not any(silo["is_uncertain"] for record in records for silo in record["silos"].values())


def test_random_receivers_are_as_many_as_uncertain_silos_and_drawn_by_the_seed():
    method = make_uefl("random", codebook={"threshold_reference": "mean"})
    clients = make_clients(method)
    server = method.initialize_server(clients).replace(round=3)
    drawn = []
    for seed in range(20):
        clients.seed = seed
        receivers = method.codebook.select_receivers(clients, server, ("ada", "bob"))
        order = permutation(derive_key(seed, 3, addresses.RANDOM_RECEIVERS), 4).tolist()
        assert receivers == tuple(sorted(SILO_NAMES[i] for i in order[:2]))
        drawn.append(receivers)
    assert len(set(drawn)) > 3
    assert method.codebook.select_receivers(clients, server.replace(round=5), ("ada", "bob")) != drawn[-1]
    (_, by_chance), (_, by_uncertainty) = (
        run(e, codebook={"threshold_reference": "mean"}) for e in ("random", "uncertain")
    )
    assert 0 < len(list_receivers(by_chance[2])) == len(list_receivers(by_uncertainty[2])) < 4


def test_no_receivers_end_the_extension_but_not_the_reports():
    server, records = run("random", codebook={"gamma": 1e9}, iterations=3)
    assert server.is_codebook_final
    assert [r["round"] for r in records if r.get("has_decision")] == [3, 5]
    method = make_uefl("uncertain")
    for is_final, receivers in ((False, ("ada",)), (True, ())):
        state = server.replace(is_codebook_final=is_final)
        assert method.codebook.select_receivers(make_clients(method), state, ("ada",)) == receivers


def count_reports(records):
    return [sum(silo["is_uncertain"] for silo in r["silos"].values()) for r in records if r.get("has_decision")]


def test_silos_are_reported_at_every_planned_decision_whoever_gets_codewords():
    (none, by_none), (_, by_all) = (
        run(e, codebook={"threshold_reference": "mean"}, iterations=3) for e in ("none", "all")
    )
    assert [r["round"] for r in by_none if r.get("has_decision")] == [3, 5]
    assert count_reports(by_none)[0] == count_reports(by_all)[0] > 0
    assert none.is_codebook_final
    assert none.access.shape[1] == 6
    assert not any(list_receivers(r) for r in by_none)


# --- validated --------------------------------------------------------------------------------------------------------


def prepare_validation():
    """Return a run at the end of its second iteration, before the codewords of its first decision are validated."""
    method = make_uefl("validated", iterations=3)
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 3)
    assert int(server.method_state[UNVALIDATED_FROM]) == 6
    server, _ = run_rounds(method, clients, 1, server)
    return method, clients, method.run_round(clients, server)


def test_codewords_are_revoked_where_validation_nll_is_lower_without_them():
    method, clients, server = prepare_validation()
    after = revoke_useless_codewords(method, clients, server)
    without = server.access.clone()
    without[:, 6:] = False
    nll = []
    for access in (server.access, without):
        broadcast = method.make_broadcast(clients, server)._replace(access=access)
        replies = clients.query(method, "evaluate", broadcast, ("validation",))
        nll.append({r.silo_name: compute_metrics(r.answers["validation"])["nll"] for r in replies})
    for k, name in enumerate(SILO_NAMES):
        is_useless = nll[1][name] < nll[0][name]
        assert torch.equal(after.access[k], (without if is_useless else server.access)[k]), name
        silo = after.open_record["silos"][name]
        if server.access[k, 6:].any():
            assert silo["revoked_codewords"] == (6 if is_useless else 0)
            assert silo["num_codewords"] == after.access[k].sum()
        else:
            assert "revoked_codewords" not in silo
    assert have_equal_bits(after.model_state, server.model_state)
    assert revoke_useless_codewords(method, clients, after) is after  # none is left to be validated


def set_nll(monkeypatch, nll):
    """Let the validation of a silo have given values of NLL, with and without its new codewords."""
    calls = iter(nll)

    def evaluate(_method, _clients, server, silo_names, _access):
        values = next(calls)
        return server, {name: values[name] for name in silo_names if name in values}

    monkeypatch.setattr(codeword_validation, "evaluate_with_access", evaluate)
    monkeypatch.setattr(codeword_validation, "_compute_nll", lambda value: value)


def test_equal_or_missing_values_revoke_nothing(monkeypatch):
    method, clients, server = prepare_validation()
    owners = [n for n, row in zip(SILO_NAMES, server.access) if row[6:].any()]
    worse, equal, missing = owners
    set_nll(monkeypatch, [{worse: 2.0, equal: 1.0, missing: 1.0}, {worse: 1.0, equal: 1.0}])
    after = revoke_useless_codewords(method, clients, server)
    num_codewords = dict(zip(SILO_NAMES, after.access.sum(1).tolist()))
    assert (num_codewords[worse], num_codewords[equal], num_codewords[missing]) == (6, 12, 12)
    assert "revoked_codewords" not in after.open_record["silos"][missing]


def test_codewords_are_validated_at_the_end_of_every_later_iteration_and_of_the_run():
    _, records = run("validated", iterations=3)
    validated = [r["round"] for r in records if any("revoked_codewords" in s for s in r["silos"].values())]
    assert validated == [5, 7]
    last = records[-1]["silos"]
    server, _ = run("validated", iterations=3)
    assert {n: s["num_codewords"] for n, s in last.items()} == dict(zip(SILO_NAMES, server.access.sum(1).tolist()))
