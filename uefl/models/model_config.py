"""Settings of the network, and the function that builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from uefl.core.errors import InputError
from uefl.core.field_rules import check_ranges, setting
from uefl.core.memory import check_memory
from uefl.models import check_encoder, get_encoder_builder
from uefl.models.augmentation import Augmentation
from uefl.models.build import build_encoder
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics
from uefl.models.network import Ensemble, Net
from uefl.models.pretrained_weights import load_weights

_USUAL_SIZES = {"width": 1024, "depth": 5, "hidden_size": 8192, "ensemble_size": 16}  # beyond them, memory is checked
_BYTES_PER_WEIGHT = 16  # a weight, its gradient and two moments of Adam, each float32


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network without its codebook."""

    encoder: str = setting("residual", "Encoder; `uefl list encoders` lists them; timm:NAME is any backbone of timm.")
    width: int = setting(
        0,
        "Width of the encoder, for `residual` the channels of its first block; 0: the encoder's default.",
        at_least=0,
        zero="the encoder's default",
    )
    depth: int = setting(
        0, "Blocks of the `residual` encoder; 0: its default.", at_least=0, zero="the encoder's default"
    )
    average_pool: bool = setting(False, "Average the encoder's feature map to one token.")
    frozen_batch_norm: bool = setting(False, "Keep the batch-norm statistics of the pretrained weights.")
    hidden_size: int = setting(
        512,
        "Units in the hidden layer of the classifier; 0: none, and the classifier is linear.",
        at_least=0,
        zero="a linear classifier",
    )
    dropout: float = setting(0.1, "Dropout probability in the classifier.", at_least=0, below=1)
    dropout_at: Literal["hidden", "logits"] = setting(
        "hidden", "Position of dropout: before and after the hidden layer, or after it and on the logits (D2)."
    )
    feature_norm: Literal["layer", "none"] = setting(
        "layer", "Normalization of features before they are divided into segments (D20)."
    )
    augment: str = setting(
        "",
        "Augmentation of training images, parts joined by +: crop:<pixels>, flip, resized-crop:<least area>, "
        "jitter:<strength>, gray:<probability>; PACS has resized-crop:0.7+flip+jitter:0.3+gray:0.1.",
    )
    ensemble_size: int = setting(1, "Networks in a deep ensemble, which replaces dropout; 1: no ensemble.", at_least=1)
    pretrained_weights: str = setting("", "Initial weights of the encoder: a file, or `imagenet`; empty: random.")

    def __post_init__(self) -> None:
        check_ranges(self)
        check_encoder(self.encoder)
        if self.augment:
            Augmentation.parse(self.augment)
        if self.frozen_batch_norm and not self.pretrained_weights:
            raise InputError(
                "frozen_batch_norm=true keeps the statistics of pretrained weights; set pretrained_weights=imagenet, "
                "or frozen_batch_norm=false"
            )

    def build_network(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        pixel_mean: Sequence[float] = (0.5,),
        pixel_std: Sequence[float] = (0.25,),
    ) -> nn.Module:
        """Build a new network for images of this shape, standardized with these constants, if it fits into memory."""
        constants = (pixel_mean, pixel_std)
        if any(getattr(self, name) > size for name, size in _USUAL_SIZES.items()):
            self._check_memory(input_shape, num_classes, *constants)
        if self.ensemble_size > 1:
            return Ensemble(lambda: self._build_member(input_shape, num_classes, 0.0, *constants), self.ensemble_size)
        return self._build_member(input_shape, num_classes, self.dropout, *constants)

    def _check_memory(
        self, input_shape: tuple[int, ...], num_classes: int, pixel_mean: Sequence[float], pixel_std: Sequence[float]
    ) -> None:
        single = replace(self, ensemble_size=1, pretrained_weights="", frozen_batch_norm=False)
        with torch.device("meta"):  # counts the weights without allocating them, but takes seconds to import
            net = single._build_member(input_shape, num_classes, 0.0, pixel_mean, pixel_std)
        num_weights = self.ensemble_size * sum(p.numel() for p in net.parameters())
        advice = "set a smaller width, depth, hidden_size or ensemble_size"
        check_memory(num_weights * _BYTES_PER_WEIGHT, f"a network of {num_weights:.2g} weights", advice)

    def _build_member(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        dropout: float,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> Net:
        return Net(
            self._build_encoder(input_shape),
            num_classes,
            input_shape,
            hidden_size=self.hidden_size,
            dropout=dropout,
            dropout_at=self.dropout_at,
            feature_norm=self.feature_norm,
            augment=self.augment,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )

    def _build_encoder(self, input_shape: tuple[int, ...]) -> nn.Module:
        sizes = {name: getattr(self, name) for name in ("width", "depth", "average_pool") if getattr(self, name)}
        is_image = len(input_shape) > 1
        if not is_image and not getattr(get_encoder_builder(self.encoder), "accepts_rows", False):
            raise InputError(f"encoder={self.encoder} needs images, but the data are rows of a table; set encoder=mlp")
        if not is_image and self.augment:
            raise InputError(f"augment={self.augment} needs images, but the data are rows of a table")
        image_size = input_shape[-1] if is_image else 1  # the features of a row are channels
        encoder = build_encoder(self.encoder, input_shape[0], image_size=image_size, **sizes)
        if not self.pretrained_weights:
            return encoder
        load_weights(encoder, self.pretrained_weights)
        return freeze_batch_norm_statistics(encoder) if self.frozen_batch_norm else encoder
