"""Any backbone of timm as an encoder; timm is an optional dependency."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Any

from torch import Tensor

from uefl.core.errors import InputError
from uefl.models.base import Encoder


class TimmEncoder(Encoder):
    """A backbone of timm without its classifier: a map [B, d, h, w], tokens [B, l, d], or [B, d] if pooled."""

    def __init__(self, model_name: str, *, in_channels: int, image_size: int, average_pool: bool = False) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        timm = _import_timm(model_name)
        if model_name not in timm.list_models():
            close = difflib.get_close_matches(model_name, timm.list_models(), 1)
            hint = f" (did you mean 'timm:{close[0]}'?)" if close else ""
            raise InputError(f"unknown encoder 'timm:{model_name}'{hint}; timm.list_models() lists all")
        self.backbone = _create_backbone(timm, model_name, in_channels, image_size)
        self.num_features, self.average_pool = self.backbone.num_features, average_pool

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.backbone.forward_features(x)
        if self.average_pool:
            pooled: Tensor = self.backbone.forward_head(z, pre_logits=True)
            return pooled
        # Some backbones, such as Swin, put channels last.
        return z.permute(0, 3, 1, 2) if z.dim() == 4 and z.shape[1] != self.num_features else z


def build_timm_encoder(
    model_name: str, *, in_channels: int, image_size: int = 224, average_pool: bool = False
) -> TimmEncoder:
    """Return a backbone of timm with random weights."""
    return TimmEncoder(model_name, in_channels=in_channels, image_size=image_size, average_pool=average_pool)


def _create_backbone(timm: Any, model_name: str, in_channels: int, image_size: int) -> Any:
    settings = {"pretrained": False, "in_chans": in_channels, "num_classes": 0}
    try:
        return timm.create_model(model_name, **settings, img_size=image_size)
    except TypeError:  # only transformers have positions that depend on the size
        return timm.create_model(model_name, **settings)


def _import_timm(model_name: str) -> ModuleType:
    try:
        import timm
    except ModuleNotFoundError as e:
        missing = "timm" if e.name == "timm" else f"{e.name}, which timm requires"
        raise InputError(f"encoder=timm:{model_name} needs {missing}: install uefl with its extra `timm`") from None
    except Exception as e:  # torchvision of another build of torch fails with errors of any kind
        reason = str(e).splitlines()[0]
        raise InputError(f"encoder=timm:{model_name}: timm cannot be imported here ({reason})") from None
    module: ModuleType = timm
    return module
