"""Any backbone of timm is an encoder; without timm, the error names the extra."""

import sys

import pytest
import torch
from harness import FedAvg, build_model, call_with_mistake

from uefl.core.errors import InputError
from uefl.models import check_encoder
from uefl.models.build import build_encoder
from uefl.models.model_config import ModelConfig

try:
    import timm  # noqa: F401

    HAS_TIMM = True
except Exception:  # also a torchvision that does not fit torch
    HAS_TIMM = False
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm cannot be imported here")


def test_a_family_needs_a_member() -> None:
    check_encoder("timm:resnet10t")
    for name in ("timm", "timm:", "vgg16:x", "tim:resnet10t"):
        with pytest.raises(InputError, match=f"unknown encoder '{name}'; known: residual, "):
            check_encoder(name)


def test_without_timm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    message = call_with_mistake("run", "fedavg", "encoder=timm:resnet10t")
    assert message == "encoder=timm:resnet10t needs timm: install uefl with its extra `timm`"


@needs_timm
@pytest.mark.parametrize(
    ("name", "pooled", "shape"),
    [
        ("resnet10t", False, (2, 512, 2, 2)),
        ("resnet10t", True, (2, 512)),
        ("vit_tiny_patch16_224", False, (2, 17, 192)),
        ("swin_tiny_patch4_window7_224", False, (2, 768, 2, 2)),
    ],
)
def test_features_of_a_backbone_have_channels_first_or_are_tokens(
    name: str, pooled: bool, shape: tuple[int, ...]
) -> None:
    encoder = build_encoder(f"timm:{name}", 1, image_size=64, average_pool=pooled)
    assert encoder.eval()(torch.zeros(2, 1, 64, 64)).shape == shape


@needs_timm
def test_a_backbone_trains_and_an_unknown_one_names_the_nearest() -> None:
    net = build_model(FedAvg(), ModelConfig(encoder="timm:resnet10t", hidden_size=8), (3, 32, 32))
    net(torch.zeros(2, 3, 32, 32)).logits.sum().backward()
    with pytest.raises(InputError, match=r"unknown encoder 'timm:resnet10x' \(did you mean 'timm:resnet10t'\?\)"):
        build_encoder("timm:resnet10x", 3, image_size=32)
