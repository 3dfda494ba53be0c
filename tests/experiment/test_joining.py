"""A silo that joins a finished run: nothing of the others moves, and its own parts are trained and stored."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import (
    CODEWORDS,
    NUM_CLASSES,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_encoder,
    make_method,
    make_striped_silo,
    make_striped_silos,
)

import uefl
from uefl.algorithms import METHODS
from uefl.algorithms.own_parts import JOINABLE_METHODS
from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.core.local import LocalTraining
from uefl.engines.stacked.seed_stack import SeedStack
from uefl.experiment.join_choice import LR_FACTORS, SHARED_PARTS, PartsPlan, Trial, iterate_folds
from uefl.experiment.join_report import describe_uncertainty
from uefl.experiment.joining import JoinResult, JoinSettings, Newcomer, join_silo
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.train import TrainingResult

NEWCOMER = make_striped_silo("bea", 24, 50, rotated=True)  # sorted, it stands between others
# With few examples, there is no choice: the first learning rate is taken.
FEW = replace(
    NEWCOMER,
    train=NEWCOMER.train._replace(x=NEWCOMER.train.x[:9], y=NEWCOMER.train.y[:9]),
    validation=NEWCOMER.validation._replace(x=NEWCOMER.validation.x[:3], y=torch.arange(3)),
)
DECAYING = LocalTraining(optimizer="adamw", lr=5e-3, weight_decay=0.1, batch_size=12, epochs=1)


def train(name: str, num_silos: int = 3, **fields: object) -> TrainingResult:
    silos = make_striped_silos()[:num_silos]
    return uefl.train(make_method(name, **fields), silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16)


@pytest.fixture(scope="module")
def result() -> TrainingResult:
    """A run with codewords of single silos, a learned gate, a label prior and weight decay."""
    return train_uefl(replace(SMALL_CODEBOOK, gate="learned"))


def train_uefl(codebook: uefl.ExtensibleCodebook) -> TrainingResult:
    short = make_method("uefl", codebook=True, local=DECAYING, logit_adjustment="local")
    method = replace(short, codebook=codebook)
    silos = make_striped_silos()[:3]
    return uefl.train(method, silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16)


@pytest.fixture(scope="module")
def joined(result: TrainingResult) -> JoinResult:
    return result.join(FEW, epochs=3, head="own", batch_norm="own", lr=(0.05,))


@pytest.mark.parametrize("head", ["own", "new", "auto"])
def test_no_tensor_of_another_silo_and_no_shared_tensor_moves_by_a_bit(result, joined, head) -> None:
    before = result.models
    after = joined.models if head == "own" else result.join(NEWCOMER, epochs=2, head=head, lr=(0.05,)).models
    for name in before.description.silo_names:
        one, other = before.select_silo(name), after.select_silo(name)
        assert have_equal_bits(one.model_state, other.model_state)
        assert one.personal_tensors == other.personal_tensors == {}
        assert one.description.silos == other.description.silos
    for name, tensor in before.model_state.items():
        assert torch.equal(after.model_state[name][: len(tensor)] if tensor.dim() else after.model_state[name], tensor)
    grown = [n for n, t in before.model_state.items() if after.model_state[n].shape != t.shape]
    assert grown == [n for n in before.model_state if n.endswith(CODEWORDS)]


def test_shared_codewords_stay_as_they_are_while_the_silo_trains(result) -> None:
    """The run has weight decay, which would shrink them."""
    newcomer = Newcomer(result.models, NEWCOMER, SHARED_PARTS, settings=JoinSettings(epochs=2), device="cpu")
    own = newcomer.add_codewords(newcomer.start_own_parts())
    trained = newcomer.train(own, 0.05)
    (name,) = own.codewords
    shared = result.models.model_state[name][result.models.access.all(0)]
    within = newcomer.engine.client_states["bea"][name]
    assert len(shared)
    assert torch.equal(within[: len(shared)], shared)
    assert not torch.equal(trained.codewords[name], own.codewords[name])


def test_the_training_moves_every_own_part(joined, result) -> None:
    start = result.join(FEW, epochs=0, head="own", batch_norm="own")
    assert joined.lr == 0.05
    (name,) = joined.own.codewords
    assert not torch.equal(joined.own.codewords[name], start.own.codewords[name])
    still = [n for n in joined.own.tensors if torch.equal(joined.own.tensors[n], start.own.tensors[n])]
    assert not still
    assert any(n.endswith("gate_logits") for n in joined.own.tensors)
    assert any(n.endswith("running_mean") for n in joined.own.tensors)
    assert any(n.startswith("classifier.") for n in joined.own.tensors)


def test_the_task_trains_codewords_even_where_the_run_trained_them_by_their_own_loss() -> None:
    codebook = replace(SMALL_CODEBOOK, codeword_gradient="code", codebook_loss_weight=0.0, commitment_weight=0.0)
    trained = train_uefl(codebook)
    start, joined = (trained.join(FEW, epochs=n, lr=(0.05,)) for n in (0, 2))
    (name,) = joined.own.codewords
    assert joined.lr == 0.05
    assert not torch.equal(start.own.codewords[name], joined.own.codewords[name])


def test_new_codewords_are_the_centroids_of_the_newcomer_s_own_features(result) -> None:
    joined = result.join(NEWCOMER, epochs=0)  # with min_examples=1, no centroids are merged
    (name,) = joined.own.codewords
    net = result.models.build().net
    features = net.encode_segments(NEWCOMER.train.x)[0]
    nearest = torch.cdist(features, joined.own.codewords[name]).argmin(1)
    for i, codeword in enumerate(joined.own.codewords[name]):
        members = features[nearest == i]
        assert len(members)
        torch.testing.assert_close(members.mean(0), codeword, rtol=1e-3, atol=1e-3)


def test_a_silo_with_fewer_examples_than_min_examples_gets_no_codewords() -> None:
    with pytest.warns(UserWarning, match="min_examples=30 is more than the largest silo has"):
        trained = train_uefl(replace(SMALL_CODEBOOK, min_examples=30))
    joined = trained.join(NEWCOMER, epochs=0)
    assert joined.num_codewords == 0
    assert not joined.own.codewords
    assert joined.shared == joined.after


def test_the_stored_model_predicts_as_the_join_evaluated_it(joined, tmp_path) -> None:
    joined.save(tmp_path)
    method = joined.models.own_method
    model = uefl.load(tmp_path, silo="bea", encoder=make_encoder(), method=method)
    prediction = model.predict(NEWCOMER.test.x)
    accuracy = float((prediction.labels == NEWCOMER.test.y.numpy()).mean())
    assert accuracy == pytest.approx(joined.after["accuracy"])
    assert float(prediction.uncertainty.entropy.mean()) == pytest.approx(joined.after["entropy"], rel=1e-5)
    assert sum(model.label_counts) == len(FEW.train.y)


def test_the_learning_rate_is_the_best_by_left_out_examples_and_never_by_test(result) -> None:
    joined = result.join(NEWCOMER, epochs=2, head="own")
    lr = result.models.method.local.lr
    assert [trial.lr for trial in joined.nll] == [0.0, *(f * lr for f in LR_FACTORS)]
    assert joined.trial == min(joined.nll, key=lambda trial: joined.nll[trial])
    assert joined.num_folds == 5
    relabeled = replace(NEWCOMER, test=NEWCOMER.test._replace(y=(NEWCOMER.test.y + 1) % NUM_CLASSES))
    assert result.join(relabeled, epochs=2, head="own").nll == joined.nll


def test_many_validation_examples_decide_themselves(result) -> None:
    silo = replace(NEWCOMER, validation=make_striped_silo("bea", 60, 52, rotated=True).train)
    joined = result.join(silo, epochs=2)
    assert joined.num_folds == 1
    assert joined.after["validation"]["nll"] == pytest.approx(joined.nll[joined.trial])
    assert {trial.plan for trial in joined.nll} == {
        PartsPlan("shared", "run"),
        PartsPlan("own", "run"),
        PartsPlan("new", "own"),
    }


def test_an_untrained_new_classifier_is_never_chosen(result) -> None:
    """Its answers are random, but uniform ones have a lower NLL than overconfident wrong ones."""
    y = torch.arange(len(NEWCOMER.train.y)) % NUM_CLASSES
    noise = replace(NEWCOMER, train=NEWCOMER.train._replace(y=y[torch.randperm(len(y))]))
    joined = result.join(noise, epochs=3, lr=(0.05,))
    assert {trial.plan.head for trial in joined.nll if trial.lr == 0} == {"shared", "own"}
    assert joined.trial.lr or joined.trial.plan.keeps_shared_values


def test_few_examples_choose_nothing_and_get_a_classifier_of_their_own(result) -> None:
    joined = result.join(FEW, epochs=1)
    assert joined.trial == Trial(PartsPlan("own", "run"), result.models.method.local.lr)
    assert joined.nll == {}


@pytest.mark.parametrize("groups", [None, torch.arange(24) // 3], ids=["examples", "groups"])
def test_folds_leave_out_every_training_example_once_and_split_no_group(groups) -> None:
    silo = replace(NEWCOMER, train=NEWCOMER.train._replace(x=torch.arange(24.0)), train_groups=groups)
    folds = list(iterate_folds(silo, 0))
    assert sorted(torch.cat([fold.validation.x for fold in folds]).tolist()) == list(range(24))
    for fold in folds:
        kept, left_out = set(fold.train.x.tolist()), set(fold.validation.x.tolist())
        assert kept | left_out == set(range(24))
        assert not kept & left_out
        if groups is not None:
            assert not {int(i) // 3 for i in kept} & {int(i) // 3 for i in left_out}
            assert fold.train_groups.tolist() == [int(i) // 3 for i in fold.train.x]


def test_a_join_without_settings_is_not_the_worst_of_its_choices() -> None:
    """The newcomer has the classes in another order, which no codeword can repair."""
    trained = uefl.train(
        make_method("uefl", codebook=True, rounds=4),
        make_striped_silos()[:2],
        make_encoder(),
        num_classes=NUM_CLASSES,
        hidden_size=16,
    )
    other = make_striped_silo("bea", 60, 50)
    silo = replace(
        other, **{s: getattr(other, s)._replace(y=(getattr(other, s).y + 1) % NUM_CLASSES) for s in ("train", "test")}
    )
    silo = replace(silo, validation=silo.validation._replace(y=(silo.validation.y + 1) % NUM_CLASSES))
    codewords_only, chosen = (trained.join(silo, epochs=20, head=head) for head in ("shared", "auto"))
    assert chosen.trial.plan.head in ("own", "new")
    assert chosen.after["nll"] < codewords_only.after["nll"] - 0.1


def test_an_own_gate_lets_features_pass_where_the_run_has_none(tmp_path) -> None:
    trained = train_uefl(SMALL_CODEBOOK)
    joined = trained.join(NEWCOMER, head="new", epochs=3, lr=(0.01,))
    assert joined.trial.plan == PartsPlan("new", "own")
    (gate,) = [t for n, t in joined.own.tensors.items() if n.endswith("gate_logits")]
    assert float(torch.sigmoid(gate).max()) < 0.1
    net = joined.model().net
    x = NEWCOMER.test.x
    with torch.no_grad():
        torch.testing.assert_close(net.extract_features(x), net.encode(x).flatten(1), rtol=0.1, atol=0.1)
        shared = trained.models.build().net
        assert not torch.allclose(shared.extract_features(x), shared.encode(x).flatten(1), rtol=0.1, atol=0.1)
    for name in trained.models.description.silo_names:  # the others have no gate
        assert joined.models.build(name).net.codebook.gate == "none"
    joined.save(tmp_path)
    loaded = uefl.load(tmp_path, silo="bea", encoder=make_encoder())
    assert (loaded.predict(x).probabilities == joined.model().predict(x).probabilities).all()
    assert float((loaded.predict(x).labels == NEWCOMER.test.y.numpy()).mean()) == pytest.approx(
        joined.after["accuracy"]
    )


def test_a_new_classifier_starts_with_initial_values(result) -> None:
    start = result.join(NEWCOMER, head="new", epochs=0).own.tensors
    initial = result.models.template.state_dict()
    heads = [n for n in start if n.startswith("classifier.")]
    assert heads
    for name in heads:
        assert torch.equal(start[name], initial[name])
        assert not torch.equal(start[name], result.models.model_state[name])


def test_a_frozen_encoder_is_run_once_and_gives_the_same_result(result, monkeypatch) -> None:
    settings = JoinSettings(epochs=2, head="own", lr=(0.01,))
    fast = join_silo(result.models, NEWCOMER, settings)
    monkeypatch.setattr("uefl.experiment.joining.encode_features", lambda _models, silo, *_: (silo, False))
    slow = join_silo(result.models, NEWCOMER, settings)
    assert fast.trial == slow.trial
    assert fast.after["nll"] == pytest.approx(slow.after["nll"], rel=1e-3)
    for name, tensor in slow.own.tensors.items():
        torch.testing.assert_close(fast.own.tensors[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["fedbn", "fedper", "fine-tuning"])
def test_methods_with_personal_tensors_give_the_newcomer_its_own(name: str) -> None:
    trained = train(name)
    joined = trained.join(NEWCOMER, epochs=2, lr=(0.01,))
    assert {t.plan.head for t in joined.nll} == ({"shared", "own", "new"} if name == "fedbn" else {"shared", "new"})
    joined = trained.join(NEWCOMER, epochs=2, lr=(0.01,), head="shared")
    assert set(joined.own.tensors) == set(trained.models.personal_names)
    for silo_name, tensors in trained.models.personal_tensors.items():
        assert have_equal_bits(tensors, joined.models.personal_tensors[silo_name])
    assert have_equal_bits(trained.models.model_state, joined.models.model_state)
    assert len(joined.model().predict(NEWCOMER.test.x)) == len(NEWCOMER.test.y)


def test_a_personal_classifier_starts_as_the_mean_over_the_other_silos() -> None:
    trained = train("fedper")
    start = trained.join(NEWCOMER, epochs=0).own.tensors
    for name in ("classifier.1.weight", "classifier.4.bias"):
        others = [tensors[name] for tensors in trained.models.personal_tensors.values()]
        torch.testing.assert_close(start[name], sum(others) / len(others))


def test_a_method_without_own_parts_says_what_can_be_joined() -> None:
    trained = train("fedavg")
    with pytest.raises(InputError, match=r"no part of a silo's own.*head=own"):
        trained.join(NEWCOMER, head="shared")
    with pytest.raises(InputError, match="gate=own needs a run with a codebook"):
        trained.join(NEWCOMER, gate="own")
    assert trained.join(NEWCOMER, head="own", epochs=1, lr=(0.01,)).own.tensors
    chosen = trained.join(NEWCOMER, epochs=1)
    assert {trial.plan for trial in chosen.nll} == {PartsPlan(head, "run") for head in ("shared", "own", "new")}


@pytest.mark.parametrize("name", [n for n in METHODS if n not in JOINABLE_METHODS.values() and n != "centralized"][:2])
def test_a_method_without_a_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} has no rule for a silo that joins"):
        train(name, 2).join(NEWCOMER)


def test_a_training_that_diverges_is_refused_or_not_chosen(result) -> None:
    with pytest.raises(InputError, match=r"lr=1e\+30: the training diverges"):
        result.join(FEW, epochs=3, head="own", lr=(1e30,))
    assert result.join(NEWCOMER, epochs=3, head="own", lr=(1e30,)).lr == 0


def test_mistakes_are_one_line(result) -> None:
    with pytest.raises(InputError, match="silo ada is in this run already"):
        result.join(replace(NEWCOMER, name="ada"))
    with pytest.raises(InputError, match="copy of silo ada"):
        uefl.join(result.models.select_silo("ada"), NEWCOMER)
    with pytest.raises(InputError, match="head=both"):
        result.join(NEWCOMER, head="both")


def test_a_joined_silo_is_calibrated_like_those_of_a_run(result, tmp_path) -> None:
    with pytest.raises(InputError, match=r"^no silo has a calibration part; set calibration_fraction="):
        result.join(FEW, epochs=0).calibrate()
    silo = replace(NEWCOMER, calibration=make_striped_silo("bea", 40, 51, rotated=True).train)
    joined = result.join(silo, epochs=1, lr=(0.01,)).calibrate(coverage=0.8, risk=0.5)
    predictions = joined.model().predict(silo.test.x)
    assert len(predictions.sets) == len(predictions.abstain) == len(silo.test.y)
    assert joined.models.description.silos["bea"].thresholds["coverage"] == 0.8
    joined.save(tmp_path)
    loaded = uefl.load(tmp_path, silo="bea", encoder=make_encoder()).predict(silo.test.x)
    assert [own.tolist() for own in loaded.sets] == [own.tolist() for own in predictions.sets]


@pytest.mark.parametrize("own", [{"head": "shared"}, {"head": "own"}, {"head": "shared", "batch_norm": "own"}], ids=str)
def test_joins_in_one_stack_equal_joins_alone(result, own) -> None:
    """Joins with other sizes and numbers of shared codewords; sums have another order in a stack."""
    fewer = train_uefl(replace(SMALL_CODEBOOK, gate="learned", num_codewords=SMALL_CODEBOOK.num_codewords - 2))
    settings = JoinSettings(epochs=2, lr=(1e-2, 1e-3), **own)
    members = [(r.models, silo) for r in (result, fewer) for silo in (NEWCOMER, make_striped_silo("bea", 30, 7))]
    assert len({int(models.access.all(0).sum()) for models, _ in members}) == 2
    stack, stacked = SeedStack(), {}

    def join_one(i: int, models: SiloModels, silo: Silo) -> None:
        stacked[i] = join_silo(
            models, silo, settings, make_clients=lambda silos, net: stack.open_clients(silos, net, 0)
        )

    stack.run([partial(join_one, i, *member) for i, member in enumerate(members)])
    for i, (models, silo) in enumerate(members):
        alone = join_silo(models, silo, settings)
        assert stacked[i].lr == alone.lr
        assert stacked[i].after["nll"] == pytest.approx(alone.after["nll"], rel=1e-3)
        for name, tensor in {**alone.own.tensors, **alone.own.codewords}.items():
            other = {**stacked[i].own.tensors, **stacked[i].own.codewords}[name]
            torch.testing.assert_close(other, tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("own", [{"fine_tuning_epochs": 2}, {"extra_rounds": 2, "group_rounds": 1}])
def test_own_models_of_a_run_change_nothing_for_a_newcomer(own: dict[str, int]) -> None:
    silos, encoder, network = make_striped_silos()[:3], make_encoder(), {"num_classes": NUM_CLASSES, "hidden_size": 16}
    methods = [make_method("uefl", codebook=True, **fields) for fields in (own, {})]
    tuned, plain = (uefl.train(method, silos, encoder, **network) for method in methods)
    one, other = (trained.join(NEWCOMER, epochs=2) for trained in (tuned, plain))
    assert one.trial == other.trial
    assert one.nll == other.nll
    assert have_equal_bits(one.own.codewords, other.own.codewords)
    assert have_equal_bits(one.own.tensors, other.own.tensors)
    assert (one.shared, one.before, one.after) == (other.shared, other.before, other.after)
    said = [describe_uncertainty(t.models, "bea", r.shared) for t, r in ((tuned, one), (plain, other))]
    assert said[0] == said[1]
    for name in ("bea", ""):
        models = [joined.models.build(name).net.state_dict() for joined in (one, other)]
        assert have_equal_bits(*models)
    assert not have_equal_bits(*(joined.models.build("ada").net.state_dict() for joined in (one, other)))


def test_own_models_that_stayed_at_their_silos_are_not_replaced_by_the_shared_one() -> None:
    """As in the coordinator's file of a deployment, which a silo may also join in one process."""
    models = replace(train("uefl", codebook=True, fine_tuning_epochs=1).models, personal_tensors={})
    joined = join_silo(models, NEWCOMER, JoinSettings(epochs=1, head="own")).models
    assert joined.build().silo_name == ""
    assert len(joined.build("bea").predict(NEWCOMER.test.x)) == len(NEWCOMER.test.y)
    with pytest.raises(InputError, match="of silo ada stayed at the silo; use the copy that the silo wrote"):
        joined.build("ada")
