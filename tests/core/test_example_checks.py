"""The library refuses what it cannot train with; each message names the silo, the value and the rule."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import NUM_CLASSES, make_encoder, make_pattern_examples, make_striped_silos
from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import InputError
from uefl.core.federation import Examples, Silo
from uefl.core.local import LocalTraining
from uefl.core.uncertainty import estimate_uncertainty
from uefl.experiment.train import train

X, Y = make_pattern_examples(20, 0)


def with_value(value, row=3):
    x = X.clone()
    x[row, 0, 2, 2] = value
    return x


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:-1], "silo north: x has 20 examples, but y has 19 labels; they must be equal"),
        (with_value(float("nan")), Y, "silo north: x[3] contains nan; all values must be finite"),
        (with_value(float("-inf"), 5), Y, "silo north: x[5] contains -inf; all values must be finite"),
        (X, Y - 1, "silo north: y contains the label -1; labels must be at least 0"),
        (X, Y.float(), "silo north: y has type float32; labels must be integers"),
        (
            X,
            nn.functional.one_hot(Y),
            "silo north: y has shape [20, 3]; labels must be class indices of shape [n]; if they are one-hot, use "
            "y.argmax(1)",
        ),
        (X, Y[:, None], "silo north: y has shape [20, 1]; labels must be class indices of shape [n]; use y[:, 0]"),
        (X, Y[0], "silo north: y has shape []; labels must be class indices of shape [n]"),
        (X[:, 0, 0, 0], Y, "silo north: x has shape [20]; it must be [examples, …], such as [n, c, h, w]"),
        (X.to(torch.complex64), Y, "silo north: x has type complex64; it must be of floats, integers or uint8 pixels"),
        (
            X[:, 0].to(torch.uint8),
            Y,
            "silo north: x of type uint8 has shape [20, 8, 8]; pixels must be images [n, c, h, w]",
        ),
        (X[:2], Y[:2], "silo north: test_fraction=0.2 of 2 examples is none; one is needed"),
    ],
)
def test_bad_examples_are_refused(x, y, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Silo.from_tensors("north", x, y)


@pytest.mark.parametrize("x", [[[1.0, 2.0], [3.0]], "images", [["a", "b"]] * 20])
def test_what_is_no_array_of_numbers_is_refused_in_one_line(x):
    with pytest.raises(InputError, match=r"^silo north: x must be a tensor, an array or a list of numbers \([^\n]+\)$"):
        Silo.from_tensors("north", x, Y)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"test_fraction": 2}, "silo north: test_fraction=2 must be greater than 0 and less than 1"),
        ({"test_fraction": 0}, "silo north: test_fraction=0 must be greater than 0 and less than 1"),
        ({"validation_fraction": 1}, "silo north: validation_fraction=1 must be at least 0 and less than 1"),
        ({"test_fraction": 0.95}, "silo north: training examples: 1; at least 2 are needed"),
    ],
)
def test_bad_fractions_are_refused(fractions, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Silo.from_tensors("north", X, Y, **fractions)


METHOD = FedAvg(rounds=1, iterations=1, mc_samples=2, local=LocalTraining(epochs=1))


def train_on(silos, encoder=None, **fields):
    fields = {"num_classes": NUM_CLASSES, "hidden_size": 8, **fields}
    return train(METHOD, silos, encoder or make_encoder(), **fields)


def cut_train(silo, count):
    return replace(silo, train=Examples(silo.train.x[:count], silo.train.y[:count]))


def make_other_shape():
    ada, bob, *_ = make_striped_silos()
    wide = {split: Examples(bob.examples(split).x.repeat(1, 1, 2, 2), bob.examples(split).y) for split in SPLITS}
    return [ada, replace(bob, **wide)]


SPLITS = ("train", "validation", "test")
ADA, *OTHERS = make_striped_silos()
NO_EXAMPLES = Examples(ADA.train.x[:0], ADA.train.y[:0])


@pytest.mark.parametrize(
    ("silos", "fields", "message"),
    [
        ([], {}, "no silos; at least one is needed"),
        ([ADA], {"num_classes": 2}, "silo ada: y contains the label 2; with num_classes=2, labels are 0 to 1"),
        ([ADA], {"num_classes": 1}, "num_classes=1 must be at least 2"),
        ([cut_train(ADA, 1), *OTHERS], {}, "silo ada: training examples: 1; at least 2 are needed"),
        ([cut_train(ADA, 0)], {}, "no silo has training examples; at least one is needed"),
        ([replace(ADA, test=NO_EXAMPLES)], {}, "no silo has test examples; at least one is needed"),
        (
            make_other_shape(),
            {},
            "silo bob: examples have shape [1, 16, 16], but those of silo ada have [1, 8, 8]; all silos must have the "
            "same shape",
        ),
        (
            [replace(ADA, test=Examples(ADA.test.x[:, :, 1:], ADA.test.y))],
            {},
            "silo ada: test examples have shape [1, 7, 8], but training examples have [1, 8, 8]; they must be equal",
        ),
        (
            [replace(ADA, train=Examples(ADA.train.x, ADA.train.y.double()))],
            {},
            "silo ada: y has type float64; labels must be integers",
        ),
        ([ADA], {"engine": "warp"}, "unknown engine 'warp'; known: auto, serial, processes, stacked, compiled"),
        ([ADA], {"device": "gpu"}, "device=gpu is not available; available devices: cpu"),
    ],
)
def test_training_refuses_bad_silos_and_names(silos, fields, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as error:
        train_on(silos, **fields)
    assert str(error.value).removeprefix(message) in ("", ", cuda, cuda:0")


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


def test_an_encoder_that_returns_a_tuple_is_refused():
    message = "an encoder must return one tensor [B,d,h,w], [B,l,d] or [B,d], not a tuple"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        train_on([ADA], TwoOutputs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": FedAvg}, "method must be a method with its settings, such as UEFL(rounds=10), not FedAvg"),
        ({"method": "fedavg"}, "method must be a method with its settings, such as UEFL(rounds=10), not str"),
        ({"encoder": None}, "encoder must be a torch.nn.Module, not NoneType"),
        ({"hidden_size": -1}, "hidden_size=-1 must be at least 0; 0 means a linear classifier"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and less than 1"),
        ({"silos": [X, Y]}, "silos[0] is a Tensor; use Silo.from_tensors(name, x, y)"),
        ({"silos": [replace(ADA, name="")]}, "silos[0] has the name ''; a name must be a text that is not empty"),
        ({"silos": [replace(ADA, name=3)]}, "silos[0] has the name 3; a name must be a text that is not empty"),
    ],
    ids=str,
)
def test_training_refuses_arguments_of_another_kind(changes, message):
    arguments = {"method": METHOD, "silos": [ADA, *OTHERS], "encoder": make_encoder(), "num_classes": NUM_CLASSES}
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        train(**{**arguments, **changes})


def test_an_encoder_for_other_inputs_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"^encoder cannot take examples of shape \[1, 8, 8\]: .*channels"):
        train_on([ADA, *OTHERS], encoder=nn.Conv2d(3, 4, 3))


def test_uncertainty_accepts_arrays():
    p = torch.rand(3, 4, 2).softmax(-1)
    assert torch.equal(estimate_uncertainty(p.numpy()).mean, estimate_uncertainty(p).mean)


def test_a_silo_without_any_training_example_is_tested_only():
    result = train_on([cut_train(ADA, 0), *OTHERS])
    assert result.records[-1]["silos"]["ada"]["num_examples"] == len(ADA.test.y)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.full((5, 3), 1 / 3), "p has shape [5, 3]; it must be [samples, examples, classes]"),
        (
            torch.tensor([[[2.0, -1.5, 0.5]]]),
            "p contains the value -1.5; it must hold probabilities, not logits: use logits.softmax(-1)",
        ),
        (
            torch.tensor([[[2.0, 1.5, 0.5]]]),
            "p contains a sum over classes of 4; it must hold probabilities, not logits: use logits.softmax(-1)",
        ),
        (
            torch.tensor([[[float("nan"), 0.5, 0.5]]]),
            "p contains a sum over classes of nan; it must hold probabilities, not logits: use logits.softmax(-1)",
        ),
    ],
)
def test_uncertainty_is_estimated_from_probabilities_only(p, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        estimate_uncertainty(p)


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X, Y.int()),
        (X.numpy(), Y.numpy()),
        (read_only(X.numpy().copy()), Y.numpy().astype(np.uint16)),
        (X.numpy()[:, :, :, ::-1][:, :, :, ::-1], Y.tolist()),
        (X.tolist(), Y.tolist()),
        (list(X), list(Y)),
    ],
    ids=["int32", "numpy", "read-only and uint16", "strided", "lists", "lists of tensors"],
)
def test_arrays_lists_and_other_integers_give_the_same_silo(x, y):
    silo, expected = Silo.from_tensors("north", x, y), Silo.from_tensors("north", X, Y)
    for split in SPLITS:
        assert torch.equal(silo.examples(split).x, expected.examples(split).x)
        assert torch.equal(silo.examples(split).y, expected.examples(split).y)
        assert silo.examples(split).y.dtype == torch.int64


def test_pixels_are_scaled_and_other_integers_stay():
    pixels = (torch.arange(20 * 64) % 256).to(torch.uint8).view(20, 1, 8, 8)
    silo = Silo.from_tensors("north", pixels, Y)
    expected = Silo.from_tensors("north", (pixels.float() / 255 - 0.5) / 0.25, Y)
    assert torch.equal(silo.train.x, expected.train.x)
    tokens = Silo.from_tensors("north", torch.arange(40).view(20, 2), Y)
    assert tokens.train.x.dtype == torch.int64


def test_training_accepts_examples_given_as_arrays():
    arrays = [replace(s, **{n: Examples(*(t.numpy() for t in s.examples(n))) for n in SPLITS}) for s in [ADA, *OTHERS]]
    encoder = make_encoder()
    assert train_on(arrays, encoder).accuracy == train_on([ADA, *OTHERS], encoder).accuracy
