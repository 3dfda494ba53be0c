"""Access to codewords, uncertain silos, extensions and the initial codebook: decisions D4 to D23."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import (
    CODEWORDS,
    LOCAL,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_striped_silos,
    run_rounds,
)

from uefl.algorithms.codeword_access import add_codewords
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL, VQFedAvg
from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.federation import Examples, is_codeword_tensor
from uefl.core.noise import derive_key, normal
from uefl.engines.serial import SerialEngine

STATIC = replace(SMALL_CODEBOOK, warmup_rounds=0, extend="none")


def make_uefl(codebook=SMALL_CODEBOOK, **fields):
    """Return UEFL with a codebook that extends all silos but the least uncertain one."""
    return UEFL(**{**SHORT_RUN, **fields}, codebook=codebook)


def run_iterations(method, clients, iterations=1):
    """Return the server before and after the extension that ends the last of these iterations."""
    server = method.initialize_server(clients)
    while True:
        server = method.run_round(clients, server)
        after = method.codebook.after_round(method, clients, server)
        if after.iteration == iterations:
            return server, after
        server = after


def find_new_codewords(before, after):
    """Return by silo the indices, among the new codewords, of those that it may use."""
    new_columns = after.access[:, before.access.shape[1] :]
    return {name: row.nonzero().flatten().tolist() for name, row in zip(after.silo_names, new_columns)}


# --- access -----------------------------------------------------------------------------------------------------------


class ObservedEngine(SerialEngine):
    """The serial engine with a list of all tensors that each silo received."""

    def _receive_broadcast(self, method, broadcast, name):
        model = super()._receive_broadcast(method, broadcast, name)
        groups = (model.params, model.received_state, model.extras, model.client_state)
        tensors = [tensor.detach().clone() for group in groups for tensor in group.values()]
        codewords = model.params[CODEWORDS].detach().clone()
        self.observations = [*getattr(self, "observations", []), (name, broadcast, tensors, codewords)]
        return model


def to_bytes(codewords):
    """Return a hashable form of each row."""
    return {row.numpy().tobytes() for row in codewords.reshape(-1, 4)}


@pytest.mark.parametrize("extension_scope", ["silo", "group"])
def test_silo_receives_only_its_own_codewords(extension_scope):
    method = make_uefl(replace(SMALL_CODEBOOK, extension_scope=extension_scope), iterations=3)
    clients = make_clients(method, engine=ObservedEngine)
    server, _ = run_rounds(method, clients)
    assert server.access.shape[1] > 6
    num_withheld = 0
    for name, broadcast, tensors, codewords in clients.observations:
        access_row = broadcast.access[broadcast.silo_names.index(name)]
        assert torch.equal(codewords, broadcast.model_state[CODEWORDS][access_row])
        withheld = to_bytes(broadcast.model_state[CODEWORDS][~access_row])
        num_withheld += len(withheld)
        for tensor in tensors:
            if tensor.dim() and tensor.shape[-1] == 4:
                assert not withheld & to_bytes(tensor)
    assert num_withheld > 50


def test_bytes_of_a_silo_depend_only_on_its_own_codewords():
    method = make_uefl()
    clients = make_clients(method)
    server, _ = run_rounds(method, clients)
    replies = list(clients.fit(method, method.make_broadcast(clients, server)))
    sizes = {r.silo_name: len(r.tensors[CODEWORDS]) for r in replies}
    assert sizes == dict(zip(server.silo_names, server.access.sum(1).tolist()))
    received_bytes = {len(r.tensors[CODEWORDS]): r.received_bytes for r in replies}
    (few, fewer_bytes), (many, more_bytes) = sorted(received_bytes.items())
    assert more_bytes - fewer_bytes == (many - few) * 4 * 4  # a codeword is four floats


def test_codeword_that_no_silo_may_use_never_changes():
    """Weight decay would shrink a codeword that is only unused, and it does shrink the others."""
    local = replace(LOCAL, optimizer="adamw", lr=0.1, weight_decay=0.5)
    method = make_uefl(STATIC, local=local)
    clients = make_clients(method)
    server = method.initialize_server(clients)
    access = server.access.clone()
    access[:, 2] = False
    access[1:, 4] = False  # only ada
    start = server.replace(access=access)
    server, _ = run_rounds(method, clients, server=start)
    before, after = start.model_state[CODEWORDS], server.model_state[CODEWORDS]
    assert torch.equal(after[2], before[2])
    assert all(not torch.equal(after[j], before[j]) for j in (0, 1, 3, 4, 5))


def test_codeword_of_one_silo_is_taken_from_its_reply():
    method = make_uefl(STATIC)
    clients = make_clients(method)
    codewords = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0))
    server = add_codewords(method.initialize_server(clients), ("bob",), codewords)
    broadcast = method.make_broadcast(clients, server)._replace(round=1)
    trained = next(r for r in clients.fit(method, broadcast) if r.silo_name == "bob").tensors[CODEWORDS]
    after, _ = run_rounds(method, clients, 1, server)
    assert torch.equal(after.model_state[CODEWORDS][6:], trained[6:])


def test_codeword_is_the_mean_over_its_silos_weighted_by_their_examples():
    method = make_uefl(STATIC)
    clients = make_clients(method, dtype=torch.float64)
    server = method.initialize_server(clients)
    access = server.access.clone()
    access[0, 5] = access[3, 5] = False  # only bob (25 images) and cyd (18)
    server = server.replace(access=access)
    broadcast = method.make_broadcast(clients, server)._replace(round=1)
    trained = {r.silo_name: r.tensors[CODEWORDS][-1] for r in clients.fit(method, broadcast)}
    after, _ = run_rounds(method, clients, 1, server)
    assert torch.allclose(after.model_state[CODEWORDS][5], (25 * trained["bob"] + 18 * trained["cyd"]) / 43, atol=1e-12)


def test_learned_gate_cannot_start_at_one():
    with pytest.raises(InputError, match="gate_value=1 must be less than 1 with gate=learned"):
        replace(SMALL_CODEBOOK, gate="learned", gate_value=1.0)
    assert replace(SMALL_CODEBOOK, gate="fixed", gate_value=1.0).gate_value == 1


@pytest.mark.parametrize("changes", [{"codeword_gradient": "task"}, {"gate": "fixed", "gate_value": 0.5}])
def test_options_change_nothing_before_there_are_codewords(changes):
    method, other = make_uefl(), make_uefl(replace(SMALL_CODEBOOK, **changes))
    for rounds, is_equal in ((1, True), (2, False)):  # the warm-up is one round
        one, two = (
            run_rounds(m, make_clients(m), rounds)[0].model_state["classifier.1.weight"] for m in (method, other)
        )
        assert torch.equal(one, two) is is_equal


def test_gate_fixed_at_one_is_the_method_without_a_gate():
    one, other = (
        run_rounds(m, make_clients(m))[0].model_state
        for m in (make_uefl(), make_uefl(replace(SMALL_CODEBOOK, gate="fixed", gate_value=1.0)))
    )
    assert have_equal_bits(one, other)


def test_learned_gate_is_averaged_and_learns():
    method = make_uefl(replace(SMALL_CODEBOOK, gate="learned", gate_value=0.5))
    clients = make_clients(method)
    server, _ = run_rounds(method, clients, 1)
    assert not server.model_state["codebook.gate_logits"].any()  # no codewords yet
    replies = {
        r.silo_name: r
        for r in clients.fit(method, method.make_broadcast(clients, server)._replace(round=2), evaluate=False)
    }
    server, _ = run_rounds(method, clients, 1, server)
    n = sum(r.num_examples for r in replies.values())
    mean = sum(r.num_examples / n * r.tensors["codebook.gate_logits"] for r in replies.values())
    assert mean.abs().min() > 0
    assert torch.allclose(server.model_state["codebook.gate_logits"], mean, atol=1e-7)


# --- uncertain silos --------------------------------------------------------------------------------------------------


def make_metrics(entropies, variance=0.0):
    return {
        silo_name: {"entropy": entropy, "entropy_variance": variance, "num_examples": 100.0}
        for silo_name, entropy in entropies.items()
    }


def test_silo_is_uncertain_if_its_entropy_exceeds_the_least_by_gamma():
    metrics = make_metrics({"ada": 0.1, "bob": 0.1099, "cyd": 0.1101, "dan": 0.4})
    assert ExtensibleCodebook(gamma=0.1).find_uncertain_silos(metrics) == ("cyd", "dan")
    assert ExtensibleCodebook(gamma=0.0).find_uncertain_silos(metrics) == ("bob", "cyd", "dan")
    assert ExtensibleCodebook(gamma=math.inf).find_uncertain_silos(metrics) == ()
    assert ExtensibleCodebook(gamma=math.inf).find_uncertain_silos({**metrics, **make_metrics({"ada": 0.0})}) == ()


def test_mean_as_threshold_reference_finds_fewer_silos():
    metrics = make_metrics({"ada": 0.1, "bob": 0.2, "cyd": 0.3})  # mean .2
    assert ExtensibleCodebook(gamma=0.1, threshold_reference="mean").find_uncertain_silos(metrics) == ("cyd",)
    assert ExtensibleCodebook(gamma=0.1).find_uncertain_silos(metrics) == ("bob", "cyd")


def test_difference_must_exceed_the_standard_errors_of_both_silos():
    """Variance .01 over 100 images each: the difference has standard error √2/100 = .0141."""
    metrics = make_metrics({"ada": 0.1, "bob": 0.128, "cyd": 0.129}, variance=0.01)
    assert ExtensibleCodebook(gamma=0.1, min_standard_errors=2).find_uncertain_silos(metrics) == ("cyd",)
    assert ExtensibleCodebook(gamma=0.1, min_standard_errors=1.9).find_uncertain_silos(metrics) == ("bob", "cyd")
    assert ExtensibleCodebook(gamma=0.1, min_standard_errors=3).find_uncertain_silos(metrics) == ()


def test_silo_with_missing_or_invalid_entropy_is_neither_the_reference_nor_uncertain():
    metrics = make_metrics({"bob": 0.1, "cyd": 0.3})
    assert ExtensibleCodebook().find_uncertain_silos({}) == ()
    for invalid in (math.nan, math.inf):
        assert ExtensibleCodebook().find_uncertain_silos({**make_metrics({"ada": invalid}), **metrics}) == ("cyd",)
        assert ExtensibleCodebook().find_uncertain_silos({**metrics, **make_metrics({"dan": invalid})}) == ("cyd",)


def test_silos_of_one_distribution_are_rarely_uncertain():
    """Nine silos of 200 validation images, entropies as a trained network has them: most near zero, a long tail.

    By γ alone, 7.1 of 9 are uncertain (γ = .1) or 5.0 (γ = .3); by the default rule 1.2 of 9. Over 300 trials these
    shares have standard errors of at most .012; the bounds say "most", "about half", "a seventh" and "hardly any".
    """
    generator, trials = torch.Generator().manual_seed(0), 300
    num_uncertain = Counter()
    for _ in range(trials):
        x = (torch.randn(9, 200, generator=generator, dtype=torch.float64) * 2 - 4).exp().clamp(max=math.log(10))
        metrics = {
            f"silo {k}": {
                "entropy": float(row.mean()),
                "entropy_variance": float(row.var(unbiased=False)),
                "num_examples": 200.0,
            }
            for k, row in enumerate(x)
        }
        for gamma in (0.1, 0.3):
            for errors in (0.0, 2.0, 3.0):
                codebook = ExtensibleCodebook(gamma=gamma, min_standard_errors=errors)
                num_uncertain[gamma, errors] += len(codebook.find_uncertain_silos(metrics))
    share = {rule: n / trials / 9 for rule, n in num_uncertain.items()}
    assert share[0.1, 0.0] > 0.7
    assert share[0.3, 0.0] > 0.45
    assert max(share[0.1, 2.0], share[0.3, 2.0]) < 0.15
    assert max(share[0.1, 3.0], share[0.3, 3.0]) < 0.02


def find_certain_silos(record):
    return [silo_name for silo_name, silo in record["silos"].items() if not silo["is_uncertain"]]


def test_uncertainty_is_measured_on_the_validation_split():
    """The least uncertain silo gets test images that are each half of another one: it is still not uncertain."""
    method = make_uefl(rounds=6, local=replace(LOCAL, epochs=3, lr=1e-2))  # trained: its predictions are confident

    def blend(examples):
        order = examples.y.argsort()  # by class: half the images away is another class
        return Examples((examples.x[order] + examples.x[order].roll(len(order) // 2, 0)) / 2, examples.y[order])

    _, after = run_iterations(method, make_clients(method))
    certain, *_ = find_certain_silos(after.completed_records[-1])
    silos = [replace(s, test=blend(s.test)) if s.name == certain else s for s in make_striped_silos()]
    _, after = run_iterations(method, make_clients(method, silos))
    entries = after.completed_records[-1]["silos"]
    uncertain = tuple(name for name, silo in entries.items() if silo["is_uncertain"])
    assert uncertain == method.codebook.find_uncertain_silos({n: silo["validation"] for n, silo in entries.items()})
    assert certain not in uncertain
    assert certain in method.codebook.find_uncertain_silos(entries)


# --- the extension ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"extension_scope": "group"}, {"retention": "newest", "extension_growth": "double"}]
)
def test_extension_leaves_all_present_tensors_and_access_unchanged(changes):
    method = make_uefl(replace(SMALL_CODEBOOK, **changes))
    before, after = run_iterations(method, make_clients(method))
    old_size = before.access.shape[1]
    assert after.access.shape[1] > old_size
    assert torch.equal(after.model_state[CODEWORDS][:old_size], before.model_state[CODEWORDS])
    assert have_equal_bits(
        {n: t for n, t in before.model_state.items() if n != CODEWORDS},
        {n: t for n, t in after.model_state.items() if n != CODEWORDS},
    )
    assert torch.equal(after.access[:, :old_size], before.access)  # the first extension revokes nothing


@pytest.mark.parametrize("codebook_init", ["kmeans", "gaussian"])
def test_size_by_the_rule_equals_the_same_size_set(codebook_init):
    """20 to 28 images of four tokens: a tenth of 22.5 is fewer than 16, the least number of codewords."""
    by_rule = make_uefl(replace(SMALL_CODEBOOK, codebook_init=codebook_init, num_codewords=0, segments=0))
    by_hand = make_uefl(replace(SMALL_CODEBOOK, codebook_init=codebook_init, num_codewords=16, segments=1))
    one, other = (run_rounds(m, make_clients(m, ensemble_size=2))[0] for m in (by_rule, by_hand))
    assert have_equal_bits(one.model_state, other.model_state)
    assert torch.equal(one.access, other.access)
    assert one.access.shape[1] > 16


def test_size_by_the_rule_stays_when_numbers_of_examples_change():
    method = make_uefl(replace(SMALL_CODEBOOK, codebook_init="gaussian", num_codewords=0))
    clients = make_clients(method)
    server = method.initialize_server(clients)
    assert server.access.shape[1] == 16
    clients.silos = {n: replace(s, train=Examples(*(t.repeat(90, *[1] * (t.dim() - 1)) for t in s.train)))
                     for n, s in clients.silos.items()}  # fmt: skip
    clients.num_examples = {n: len(s.train.y) for n, s in clients.silos.items()}
    assert method.codebook.choose_size(clients.net, clients.num_examples.values()).num_codewords > 256
    extended = method.codebook.extend_codebook(method, clients, server, ("ada", "bob"))
    assert extended.access.shape[1] == 16 + 2 * 16


def test_every_uncertain_silo_gets_its_own_codewords():
    method = make_uefl()
    before, after = run_iterations(method, make_clients(method))
    new_codewords = find_new_codewords(before, after)
    (certain,) = find_certain_silos(after.completed_records[-1])
    assert new_codewords.pop(certain) == []
    assert sorted(j for indices in new_codewords.values() for j in indices) == list(range(18))  # each has one silo
    assert [len(indices) for indices in new_codewords.values()] == [6, 6, 6]


def test_uncertain_silos_of_a_group_share_new_codewords():
    method = make_uefl(replace(SMALL_CODEBOOK, extension_scope="group"))
    before, after = run_iterations(method, make_clients(method))
    assert sorted(map(len, find_new_codewords(before, after).values())) == [0, 6, 6, 6]
    assert after.access.shape[1] == 12


def test_new_codewords_are_centroids_of_the_training_features_of_the_silo():
    method = make_uefl()
    clients = make_clients(method)
    before, after = run_iterations(method, clients)
    for silo_name, indices in find_new_codewords(before, after).items():
        if indices:
            clients._receive_broadcast(method, method.make_broadcast(clients, before), silo_name)
            with torch.no_grad():
                segments = clients.net.eval().encode_segments(clients.silos[silo_name].train.x)[0]
            codewords = after.model_state[CODEWORDS][6:][indices]
            label = torch.cdist(segments, codewords).argmin(1)
            for j, codeword in enumerate(codewords):
                assert torch.allclose(codeword, segments[label == j].mean(0), atol=1e-5), (silo_name, j)
            distances = (torch.cdist(segments, c).min(1).values for c in (codewords, before.model_state[CODEWORDS]))
            new_error, old_error = (distance.square().mean() for distance in distances)
            assert new_error < old_error


def test_kmeans_of_a_silo_draws_anew_with_every_seed_silo_and_round():
    method = make_uefl(replace(SMALL_CODEBOOK, codebook_init="gaussian"))
    same_data = [replace(silo, name=name) for silo in make_striped_silos()[:1] for name in ("ada", "bob")]

    def query(seed, round_number):
        clients = make_clients(method, same_data)  # the network depends on the seed too: keep its weights
        server = method.initialize_server(clients).replace(round=round_number)
        clients.seed = seed
        _, centroids = method.codebook.query_centroids(method, clients, server, server.silo_names, 6)
        return centroids

    first = query(0, 1)
    assert torch.equal(first["ada"].centroids, query(0, 1)["ada"].centroids)
    others = (first["bob"], query(1, 1)["ada"], query(0, 2)["ada"])
    assert not any(torch.equal(first["ada"].centroids, other.centroids) for other in others)


def test_extension_adds_a_constant_number_or_doubles_the_largest_codebook():
    for growth, expected in (("constant", [6, 12, 18]), ("double", [6, 12, 24])):
        method = make_uefl(replace(SMALL_CODEBOOK, extension_growth=growth), iterations=3)
        server, records = run_rounds(method, make_clients(method))
        most = [max(silo["num_codewords"] for silo in records[i]["silos"].values()) for i in (2, 4, 6)]
        assert most[0] == expected[0]
        assert most[1] == expected[1]
        assert most[2] in expected[1:]  # the silo that is not uncertain may be another one the second time
        assert server.access.sum(1).max() == most[2]
    assert most[2] == 24


def test_number_of_doubled_codewords_is_that_of_the_receiver_with_most():
    """Ada has 6 codewords and bob 10: extended together, both receive 10 (D23)."""
    method = make_uefl(replace(SMALL_CODEBOOK, codebook_init="gaussian", extension_growth="double"))
    clients = make_clients(method)
    own = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    server = add_codewords(method.initialize_server(clients), ("bob",), own)
    after = method.codebook.extend_codebook(method, clients, server, ("ada", "bob"))
    assert after.access.sum(1).tolist() == [6 + 10, 10 + 10, 6, 6]


def test_retention_newest_revokes_earlier_codewords_of_the_silo():
    method = make_uefl(replace(SMALL_CODEBOOK, retention="newest"), iterations=3)
    _, first = run_iterations(method, make_clients(method), 1)
    before, second = run_iterations(method, make_clients(method), 2)
    assert torch.equal(before.access, first.access)
    new_codewords = find_new_codewords(before, second)
    for k, silo_name in enumerate(second.silo_names):
        if new_codewords[silo_name]:
            expected = [*range(6), *(24 + j for j in new_codewords[silo_name])]
            assert second.access[k].nonzero().flatten().tolist() == expected
        else:
            assert torch.equal(second.access[k, :24], before.access[k])
    record = second.completed_records[-1]
    recorded = {silo_name: silo["new_codewords"] for silo_name, silo in record["silos"].items()}
    assert recorded == {silo_name: len(indices) for silo_name, indices in new_codewords.items()}
    retain_all, _ = run_rounds(make_uefl(iterations=3), make_clients(make_uefl()))
    assert retain_all.access.sum(1).max() == 18


def test_new_codewords_can_be_gaussian():
    method = make_uefl(replace(SMALL_CODEBOOK, new_codeword_init="gaussian"))
    before, after = run_iterations(method, make_clients(method))
    for silo_name, indices in find_new_codewords(before, after).items():
        if indices:
            noise_key = derive_key(0, silo_name, before.round, addresses.NEW_CODEWORDS)
            assert torch.equal(after.model_state[CODEWORDS][6:][indices], normal(noise_key, (1, 6, 4))[0])


def test_silo_with_few_distinct_features_gets_and_records_fewer_codewords():
    """One image twice with four tokens of two segments: at most eight distinct features per silo."""

    def repeat_first(examples):
        return Examples(examples.x[:1].repeat(2, 1, 1, 1), examples.y[:1].repeat(2))

    silos = [replace(silo, train=repeat_first(silo.train)) for silo in make_striped_silos()]
    method = make_uefl(replace(SMALL_CODEBOOK, num_codewords=50, warmup_rounds=0))
    clients = make_clients(method, silos)
    start = method.initialize_server(clients)
    assert start.access.shape[1] <= 32
    server, records = run_rounds(method, clients, server=start)
    new_codewords = [silo["new_codewords"] for silo in records[2]["silos"].values() if silo["is_uncertain"]]
    assert new_codewords
    assert all(0 < n <= 8 for n in new_codewords)
    assert server.access.shape[1] == start.access.shape[1] + sum(new_codewords)


# --- the initial codebook ---------------------------------------------------------------------------------------------


def test_gaussian_initial_codebook_is_shared_from_the_first_round():
    method = make_uefl(replace(SMALL_CODEBOOK, codebook_init="gaussian"))
    server = method.initialize_server(make_clients(method))
    assert server.access.tolist() == [[True] * 6] * 4
    expected = normal(derive_key(0, 0, addresses.INITIAL_CODEWORDS), (1, 6, 4))[0]
    assert torch.equal(server.model_state[CODEWORDS], expected)
    other_seed = method.initialize_server(make_clients(method, seed=1)).model_state[CODEWORDS]
    assert torch.equal(other_seed, normal(derive_key(1, 0, addresses.INITIAL_CODEWORDS), (1, 6, 4))[0])
    _, records = run_rounds(method, make_clients(method))
    assert [record["silos"]["ada"]["num_codewords"] for record in records[:3]] == [6, 6, 6]


def test_warmup_rounds_are_those_of_fedavg():
    method, fedavg = make_uefl(replace(SMALL_CODEBOOK, warmup_rounds=2)), FedAvg(**SHORT_RUN)
    clients, fedavg_clients = make_clients(method), make_clients(fedavg)
    server, fedavg_server = method.initialize_server(clients), fedavg.initialize_server(fedavg_clients)
    assert server.model_state[CODEWORDS].shape == (0, 4)
    for _ in range(2):
        server, fedavg_server = method.run_round(clients, server), fedavg.run_round(fedavg_clients, fedavg_server)
    weights = {n: t for n, t in server.model_state.items() if not is_codeword_tensor(n)}
    assert have_equal_bits(weights, fedavg_server.model_state)


def test_kmeans_initial_codebook_fits_features_better_than_gaussian_noise():
    def run(codebook_init):
        method = make_uefl(replace(SMALL_CODEBOOK, num_codewords=12, extend="none", codebook_init=codebook_init))
        _, records = run_rounds(method, make_clients(method), 3)
        silos = records[-1]["silos"].values()
        return {m: sum(silo[m] for silo in silos) / 4 for m in ("quantization_error", "perplexity")}

    kmeans, gaussian = run("kmeans"), run("gaussian")
    assert kmeans["quantization_error"] < gaussian["quantization_error"]
    assert kmeans["perplexity"] > gaussian["perplexity"] > 1


@pytest.mark.parametrize("codebook_init", ["kmeans", "gaussian"])
def test_codebook_per_domain_is_used_only_by_silos_of_that_domain(codebook_init):
    codebook = replace(SMALL_CODEBOOK, initial_codebook="per_domain", extend="none", codebook_init=codebook_init)
    method = VQFedAvg(**SHORT_RUN, codebook=codebook)
    server, _ = run_rounds(method, make_clients(method))
    rotated, upright = [True] * 6 + [False] * 6, [False] * 6 + [True] * 6
    assert server.access.tolist() == [upright, upright, rotated, rotated]
    assert not torch.equal(server.model_state[CODEWORDS][:6], server.model_state[CODEWORDS][6:])


def test_recorded_code_loss_has_the_sum_of_both_weights():
    method = make_uefl(replace(SMALL_CODEBOOK, commitment_weight=0.5, codebook_loss_weight=2.0))
    _, records = run_rounds(method, make_clients(method))
    metrics = records[-1]["silos"]["ada"]
    assert metrics["code_loss"] == pytest.approx(2.5 * metrics["quantization_error"])
    assert metrics["quantization_error"] > 0
    assert ExtensibleCodebook(commitment_weight=0.25, codebook_loss_weight=1.0).code_loss_weight == 1.25


# --- rounds and iterations --------------------------------------------------------------------------------------------


def find_decision_rounds(records):
    return [record["round"] for record in records if record.get("has_decision")]


@pytest.mark.parametrize("warmup_rounds", [0, 1, 2])
def test_total_rounds_include_the_warmup_and_every_iteration_but_the_last_ends_with_a_decision(warmup_rounds):
    method = make_uefl(replace(SMALL_CODEBOOK, warmup_rounds=warmup_rounds), iterations=3)
    server, records = run_rounds(method, make_clients(method))
    assert method.total_rounds == 3 + 2 * 2
    assert server.round == 7
    assert find_decision_rounds(records) == [3, 5]  # not after the last round: the codewords would not be trained
    num_codewords = [record["silos"]["ada"]["num_codewords"] for record in records]
    assert num_codewords[:3] == [0] * warmup_rounds + [6] * (3 - warmup_rounds)


def test_run_with_a_final_codebook_continues_for_all_rounds():
    method = make_uefl(replace(SMALL_CODEBOOK, gamma=math.inf), iterations=4)
    clients = make_clients(method)
    server, records = run_rounds(method, clients, 3)
    assert server.is_codebook_final
    later, later_records = run_rounds(method, clients, server=server)
    assert later.round == method.total_rounds == 9
    assert find_decision_rounds(records + later_records) == [3, 5, 7], "silos are reported, but get no codewords"
    assert later.access.shape == server.access.shape
    assert not torch.equal(later.model_state["classifier.1.weight"], server.model_state["classifier.1.weight"])


def test_infinite_gamma_equals_a_static_codebook():
    infinite = make_uefl(replace(SMALL_CODEBOOK, gamma=math.inf))
    static = VQFedAvg(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, extend="none"))
    (one, records), (other, _) = (run_rounds(method, make_clients(method)) for method in (infinite, static))
    assert have_equal_bits(one.model_state, other.model_state)
    assert torch.equal(one.access, other.access)
    assert one.access.shape[1] == 6
    assert not any(silo["is_uncertain"] for record in records for silo in record["silos"].values())
    assert run_rounds(make_uefl(), make_clients(make_uefl()))[0].access.shape[1] > 6


def test_one_iteration_never_extends():
    method = make_uefl(iterations=1)
    server, records = run_rounds(method, make_clients(method))
    assert server.round == method.rounds
    assert server.access.shape[1] == 6
    assert find_decision_rounds(records) == []


def test_iterations_without_extra_rounds_never_extend():
    method = make_uefl(extra_rounds=0, iterations=5)
    server, _ = run_rounds(method, make_clients(method))
    assert server.round == 3
    assert server.access.shape[1] == 6


def test_learning_rate_schedule_covers_all_iterations():
    method = make_uefl(local=replace(LOCAL, schedule="cosine"))
    clients = make_clients(method)
    server, lrs = method.initialize_server(clients), []
    while server.round < method.total_rounds:
        lrs.append(method.make_broadcast(clients, server).lr)
        server = method.step(clients, server)
    assert lrs == pytest.approx([0.003 * 0.5 * (1 + math.cos(math.pi * r / 5)) for r in range(5)])
