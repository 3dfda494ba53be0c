"""Codewords of a silo without training data: three choices are evaluated, and a setting decides which counts (D15)."""

from dataclasses import replace

import pytest
from harness import CODEWORDS, SHORT_RUN, SMALL_CODEBOOK, make_clients, make_striped_silos, run_rounds

from uefl.algorithms.uefl import UEFL
from uefl.core.errors import InputError
from uefl.core.federation import Examples


def make_target(**splits):
    """Return the last striped silo without training data."""
    silo = make_striped_silos()[-1]
    return replace(silo, train=Examples(silo.train.x[:0], silo.train.y[:0]), **splits)


def run_with_target(target=None, **changes):
    """Run UEFL with the last silo as a target without training data; return the clients, the server and the records."""
    method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, **changes))
    clients = make_clients(method, [*make_striped_silos()[:-1], target or make_target()])
    return (method, clients, *run_rounds(method, clients))


def query_entropies(method, clients, server, split):
    """Return the entropy of the target on a split with the codewords of each trained silo."""
    entropies = []
    for row in server.access[:3]:
        access = server.access.clone()
        access[-1] = row
        broadcast = method.make_broadcast(clients, server)._replace(access=access, participants=("dan",))
        (reply,) = clients.query(method, "evaluate", broadcast, (split,))
        entropies.append(float(reply.answers[split]["entropy"] / reply.answers[split]["num_examples"]))
    return entropies


@pytest.mark.parametrize("target_access", ["shared", "all", "least_uncertain"])
def test_metrics_of_a_target_are_those_of_the_chosen_access(target_access):
    _, _, server, records = run_with_target(target_access=target_access)
    assert server.access[-1].tolist() == [True] * 6 + [False] * (server.access.shape[1] - 6)  # none of its own
    target = records[-1]["silos"]["dan"]
    assert set(target["target_metrics"]) == {"shared", "all", "least_uncertain"}
    assert target["target_metrics"][target_access].items() <= target.items()
    entropies = {name: metrics["entropy"] for name, metrics in target["target_metrics"].items()}
    assert entropies["all"] != entropies["shared"]
    assert not any("target_metrics" in records[-1]["silos"][name] for name in ("ada", "bob", "cyd"))


def find_images_that_prefer_different_silos(method, server):
    """Return two images; as validation image, one prefers another silo's codewords than the other as test image."""
    pool, preferred = make_striped_silos()[-1].train, []
    for i in range(len(pool.y)):
        image = Examples(pool.x[i : i + 1], pool.y[i : i + 1])
        target = make_target(validation=image, test=image)
        clients = make_clients(method, [*make_striped_silos()[:-1], target])
        entropies = [query_entropies(method, clients, server, split) for split in ("validation", "test")]
        chosen = [min(range(3), key=e.__getitem__) for e in entropies]
        for earlier, by_validation in preferred:
            if by_validation != chosen[1]:
                return earlier, image
        preferred.append((image, chosen[0]))
    raise AssertionError("all images prefer the same silo")


def test_least_uncertain_access_is_chosen_by_validation_images_and_never_by_test_images():
    method, _, server, _ = run_with_target(target_access="least_uncertain")
    validation, test = find_images_that_prefer_different_silos(method, server)
    target = make_target(validation=validation, test=test)
    method, clients, server, records = run_with_target(target, target_access="least_uncertain")
    by_validation, by_test = (query_entropies(method, clients, server, split) for split in ("validation", "test"))
    chosen = min(range(3), key=by_validation.__getitem__)
    metrics = records[-1]["silos"]["dan"]["target_metrics"]["least_uncertain"]
    assert metrics["entropy"] == pytest.approx(by_test[chosen])
    assert by_test[chosen] != min(by_test), "the data do not distinguish the two rules"


def test_validation_images_of_a_target_count_in_no_decision():
    _, _, _, records = run_with_target()
    assert all("validation" not in record["silos"]["dan"] for record in records)
    assert all("validation" in record["silos"]["ada"] for record in records)
    assert not any(record["silos"]["dan"]["is_uncertain"] for record in records)


def test_least_uncertain_access_without_validation_images_is_an_input_error():
    no_examples = make_target().train
    with pytest.raises(InputError, match="target_access=least_uncertain needs validation images at dan"):
        run_with_target(make_target(validation=no_examples), target_access="least_uncertain")
    _, _, _, records = run_with_target(make_target(validation=no_examples))
    assert set(records[-1]["silos"]["dan"]["target_metrics"]) == {"shared", "all"}


def test_choices_are_not_evaluated_while_all_silos_use_the_same_codewords():
    _, _, server, records = run_with_target(extend="none")
    assert server.model_state[CODEWORDS].shape == (6, 4)
    assert not any("target_metrics" in silo for record in records for silo in record["silos"].values())
