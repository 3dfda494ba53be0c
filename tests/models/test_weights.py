"""Weights load exactly or not at all."""

import pickle
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from uefl.errors import InputError
from uefl.models.encoders import encoder
from uefl.models.weights import load_weights

NET = {"size": 16}  # of the encoder that most tests use


def dirt(seed: int, channels: int = 3) -> nn.Module:
    """A small encoder with batch norm."""
    torch.manual_seed(seed)
    return encoder("dirt", channels, **NET)


def assert_same(net: nn.Module, state: dict[str, Tensor], **tolerance: float) -> None:
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, state[name], check_dtype=False, **tolerance)


def saved(state: dict[str, Tensor], path: Path) -> str:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_what_was_saved_is_loaded(tmp_path: Path, suffix: str) -> None:
    state, net = dirt(1).state_dict(), dirt(2)
    report = load_weights(net, saved(state, tmp_path / f"w{suffix}"))
    assert_same(net, state, rtol=0, atol=0)
    assert report[1:] == (len(state), 0, "float32", False)


@pytest.mark.parametrize(("name", "head"), [("vgg11", "classifier.6"), ("resnet18", "fc")])
def test_a_full_model_of_torchvision_loads_without_its_classifier(tmp_path: Path, name: str, head: str) -> None:
    state, net = encoder(name, 3).state_dict(), encoder(name, 3)
    full = OrderedDict(state, **{f"{head}.weight": torch.zeros(10, 512), f"{head}.bias": torch.zeros(10)})
    report = load_weights(net, saved(full, tmp_path / "full.pth"))
    assert_same(net, state, rtol=0, atol=0)
    assert (report.loaded, report.ignored) == (len(state), 2)


def test_a_file_as_old_as_the_official_ones_loads(tmp_path: Path) -> None:
    """They are not zips, and their batch norms count no batches."""
    state, net = dirt(1).state_dict(), dirt(2)
    old = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert load_weights(net, str(tmp_path / "w.pth")).loaded == len(old)
    assert_same(net, state)


def test_parameters_saved_as_such_load(tmp_path: Path) -> None:
    net = encoder("mlp", 1, size=4, width=8)
    torch.save(dict(encoder("mlp", 1, size=4, width=8).named_parameters()), tmp_path / "w.pth")
    load_weights(net, str(tmp_path / "w.pth"))
    assert all(p.requires_grad and p.is_leaf for p in net.parameters())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_half_precision_is_raised_to_that_of_the_encoder(tmp_path: Path, suffix: str) -> None:
    state, net = dirt(1).state_dict(), dirt(2)
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    report = load_weights(net, saved(half, tmp_path / f"w{suffix}"))
    assert report.precision == "float16"
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert_same(net, half, rtol=0, atol=0)


def test_grey_images_are_seen_as_three_equal_channels_were(tmp_path: Path) -> None:
    colour, grey = dirt(1, channels=3).eval(), dirt(2, channels=1).eval()
    report = load_weights(grey, saved(colour.state_dict(), tmp_path / "w.safetensors"))
    assert report.summed
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


def without(name: str) -> dict[str, Tensor]:
    return {k: v for k, v in dirt(1).state_dict().items() if k != name}


BROKEN = {
    "no 'layers.0.weight' (1 of 16 tensors of the encoder are missing)": without("layers.0.weight"),
    "'layers.0.bias' has shape [31], the encoder needs [32]": without("") | {"layers.0.bias": torch.zeros(31)},
    "'layer9.weight' is not the encoder's (1 of 17": without("") | {"layer9.weight": torch.zeros(1)},
    "'layers.0.bias' is torch.int64": without("") | {"layers.0.bias": torch.zeros(32, dtype=torch.int64)},
    "'layers.0.bias' holds values that are not finite": without("") | {"layers.0.bias": torch.full((32,), torch.nan)},
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("reason", BROKEN)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, reason: str, suffix: str) -> None:
    net = dirt(2)
    source = saved(BROKEN[reason], tmp_path / f"w{suffix}")
    with pytest.raises(InputError) as error:
        load_weights(net, source)
    assert str(error.value).startswith(f"{source}: {reason}")
    assert_same(net, dirt(2).state_dict(), rtol=0, atol=0)


def test_a_larger_relative_does_not_pass_for_the_encoder(tmp_path: Path) -> None:
    """All tensors of a ResNet18 stand in a ResNet34, which has more."""
    net = encoder("resnet18", 3)
    more = {"layer1.2.conv1.weight": torch.zeros(64, 64, 3, 3)}
    with pytest.raises(InputError, match=r"layer1\.2\.conv1\.weight"):
        load_weights(net, saved({**net.state_dict(), **more}, tmp_path / "w.pth"))


class Code:
    """A pickle that would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_unexecuted(tmp_path: Path, zipped: bool) -> None:
    bad, trace = tmp_path / "w.pth", tmp_path / "executed"
    torch.save({"x": Code(trace)}, bad, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match="more than tensors"):
        load_weights(dirt(1), str(bad))
    bad.write_bytes(pickle.dumps(Code(trace)))
    with pytest.raises(InputError):
        load_weights(dirt(1), str(bad))
    assert not trace.exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    torch.save({"state_dict": dirt(1).state_dict()}, tmp_path / "nested.pth")
    (tmp_path / "folder.pth").mkdir()
    reasons = {"list.pth": "not a table", "nested.pth": "not a table", "folder.pth": "no such file"}
    for name, reason in (reasons | {"none.pth": "no such file", "w.onnx": "weights are a file"}).items():
        with pytest.raises(InputError, match=f"{name}: {reason}"):
            load_weights(dirt(1), str(tmp_path / name))


TINY = encoder("mlp", 1, size=2, width=2).state_dict()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a tiny network, as bytes."""
    path = tmp_path_factory.mktemp("intact")
    torch.save(TINY, path / "zip.pth")
    torch.save(TINY, path / "old.pth", _use_new_zipfile_serialization=False)
    files = {name: (path / f"{name}.pth").read_bytes() for name in ("zip", "old")}
    return files | {"safetensors": save(TINY)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["zip", "old", "safetensors"]))
def test_a_damaged_file_is_refused_or_loads(
    tmp_path: Path, intact: dict[str, bytes], data: st.DataObject, kind: str
) -> None:
    raw = bytearray(intact[kind])
    del raw[data.draw(st.integers(0, len(raw))) :]
    for place in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)):
        raw[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    path.write_bytes(raw)
    with suppress(InputError):  # anything else fails the test
        load_weights(encoder("mlp", 1, size=2, width=2), str(path))
