"""Weights load exactly, or an input error leaves the encoder unchanged."""

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

from uefl.core.errors import InputError
from uefl.models.build import build_encoder
from uefl.models.pretrained_weights import load_weights


def make_dirt(seed: int, in_channels: int = 3) -> nn.Module:
    """Return a small encoder with batch norm."""
    torch.manual_seed(seed)
    return build_encoder("dirt", in_channels, image_size=16)


def assert_equal_tensors(net: nn.Module, state: dict[str, Tensor], **tolerance: float) -> None:
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, state[name], check_dtype=False, **tolerance)


def save_tensors(state: dict[str, Tensor], path: Path) -> str:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_saved_tensors_are_loaded(tmp_path: Path, suffix: str) -> None:
    state, net = make_dirt(1).state_dict(), make_dirt(2)
    report = load_weights(net, save_tensors(state, tmp_path / f"w{suffix}"))
    assert_equal_tensors(net, state, rtol=0, atol=0)
    assert report[1:] == (len(state), 0, "float32", False)


@pytest.mark.parametrize(("name", "head"), [("vgg11", "classifier.6"), ("resnet18", "fc")])
def test_a_full_torchvision_model_loads_without_its_classifier(tmp_path: Path, name: str, head: str) -> None:
    state, net = build_encoder(name, 3).state_dict(), build_encoder(name, 3)
    full = OrderedDict(state, **{f"{head}.weight": torch.zeros(10, 512), f"{head}.bias": torch.zeros(10)})
    report = load_weights(net, save_tensors(full, tmp_path / "full.pth"))
    assert_equal_tensors(net, state, rtol=0, atol=0)
    assert (report.num_loaded, report.num_ignored) == (len(state), 2)


def test_an_old_file_format_loads(tmp_path: Path) -> None:
    """Some official files are no zip files, and their batch norms have no batch counts."""
    state, net = make_dirt(1).state_dict(), make_dirt(2)
    old = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert load_weights(net, str(tmp_path / "w.pth")).num_loaded == len(old)
    assert_equal_tensors(net, state)


def test_files_of_parameters_load(tmp_path: Path) -> None:
    net = build_encoder("mlp", 1, image_size=4, width=8)
    torch.save(dict(build_encoder("mlp", 1, image_size=4, width=8).named_parameters()), tmp_path / "w.pth")
    load_weights(net, str(tmp_path / "w.pth"))
    assert all(p.requires_grad and p.is_leaf for p in net.parameters())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_half_precision_is_converted_to_that_of_the_encoder(tmp_path: Path, suffix: str) -> None:
    state, net = make_dirt(1).state_dict(), make_dirt(2)
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    report = load_weights(net, save_tensors(half, tmp_path / f"w{suffix}"))
    assert report.file_dtype == "float16"
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert_equal_tensors(net, half, rtol=0, atol=0)


def test_grayscale_images_have_the_features_of_three_equal_channels(tmp_path: Path) -> None:
    color, gray = make_dirt(1, in_channels=3).eval(), make_dirt(2, in_channels=1).eval()
    report = load_weights(gray, save_tensors(color.state_dict(), tmp_path / "w.safetensors"))
    assert report.has_summed_filters
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(gray(x), color(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


def drop_tensor(name: str) -> dict[str, Tensor]:
    return {k: v for k, v in make_dirt(1).state_dict().items() if k != name}


BROKEN = {
    "the encoder's tensor 'layers.0.weight' is missing (1 of 16 tensors are missing)": drop_tensor("layers.0.weight"),
    "'layers.0.bias' has shape [31], the encoder needs [32]": drop_tensor("") | {"layers.0.bias": torch.zeros(31)},
    "the encoder has no tensor 'layer9.weight' (1 of 17 tensors are unknown)": drop_tensor("")
    | {"layer9.weight": torch.zeros(1)},
    "'layers.0.bias' is torch.int64": drop_tensor("") | {"layers.0.bias": torch.zeros(32, dtype=torch.int64)},
    "'layers.0.bias' has values that are not finite": drop_tensor("") | {"layers.0.bias": torch.full((32,), torch.nan)},
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("reason", BROKEN)
def test_tensors_that_do_not_fit_raise_an_input_error_and_change_nothing(
    tmp_path: Path, reason: str, suffix: str
) -> None:
    net = make_dirt(2)
    source = save_tensors(BROKEN[reason], tmp_path / f"w{suffix}")
    with pytest.raises(InputError) as error:
        load_weights(net, source)
    assert str(error.value).startswith(f"{source}: {reason}")
    assert_equal_tensors(net, make_dirt(2).state_dict(), rtol=0, atol=0)


def test_a_larger_network_of_the_same_family_is_rejected(tmp_path: Path) -> None:
    """A ResNet34 has all tensors of a ResNet18, and more."""
    net = build_encoder("resnet18", 3)
    more = {"layer1.2.conv1.weight": torch.zeros(64, 64, 3, 3)}
    with pytest.raises(InputError, match=r"layer1\.2\.conv1\.weight"):
        load_weights(net, save_tensors({**net.state_dict(), **more}, tmp_path / "w.pth"))


class Code:
    """A pickle that would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_rejected_and_not_executed(tmp_path: Path, zipped: bool) -> None:
    bad, trace = tmp_path / "w.pth", tmp_path / "executed"
    torch.save({"x": Code(trace)}, bad, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match="not only tensors"):
        load_weights(make_dirt(1), str(bad))
    bad.write_bytes(pickle.dumps(Code(trace)))
    with pytest.raises(InputError):
        load_weights(make_dirt(1), str(bad))
    assert not trace.exists()


def test_other_files_raise_an_input_error(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    torch.save({"state_dict": make_dirt(1).state_dict()}, tmp_path / "nested.pth")
    (tmp_path / "folder.pth").mkdir()
    reasons = {
        "list.pth": "not a dictionary of tensors",
        "nested.pth": "not a dictionary of tensors",
        "folder.pth": "no such file",
    }
    for name, reason in (reasons | {"none.pth": "no such file", "w.onnx": "weights must be a"}).items():
        with pytest.raises(InputError, match=f"{name}: {reason}"):
            load_weights(make_dirt(1), str(tmp_path / name))


TINY = build_encoder("mlp", 1, image_size=2, width=2).state_dict()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return files of a tiny network, as bytes."""
    path = tmp_path_factory.mktemp("intact")
    torch.save(TINY, path / "zip.pth")
    torch.save(TINY, path / "old.pth", _use_new_zipfile_serialization=False)
    files = {name: (path / f"{name}.pth").read_bytes() for name in ("zip", "old")}
    return files | {"safetensors": save(TINY)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["zip", "old", "safetensors"]))
def test_a_damaged_file_raises_an_input_error_or_loads(
    tmp_path: Path, intact: dict[str, bytes], data: st.DataObject, kind: str
) -> None:
    raw = bytearray(intact[kind])
    del raw[data.draw(st.integers(0, len(raw))) :]
    for i in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)):
        raw[i : i + 1] = data.draw(st.binary(min_size=1, max_size=1))
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    path.write_bytes(raw)
    with suppress(InputError):  # anything else fails the test
        load_weights(build_encoder("mlp", 1, image_size=2, width=2), str(path))
