"""Settings of the network, and the function that builds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from uefl.core.errors import InputError
from uefl.core.field_rules import check_ranges, setting
from uefl.models import ENCODERS
from uefl.models.augmentation import Augmentation
from uefl.models.build import build_encoder
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics
from uefl.models.network import Ensemble, Net
from uefl.models.pretrained_weights import load_weights


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network without its codebook."""

    encoder: str = setting("residual", "Encoder; `uefl list encoders` lists them.")
    width: int = setting(
        0, "Width of the encoder, for `residual` the channels of its first block; 0: the encoder's default.", at_least=0
    )
    depth: int = setting(0, "Blocks of the `residual` encoder; 0: its default.", at_least=0)
    average_pool: bool = setting(False, "Average the encoder's feature map to one token.")
    frozen_batch_norm: bool = setting(False, "Keep the batch-norm statistics of the pretrained weights.")
    hidden_size: int = setting(512, "Units in the hidden layer of the classifier.", at_least=1)
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
        ENCODERS.check_name(self.encoder)
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
        """Build a new network for images of this shape, standardized with these constants."""
        constants = (pixel_mean, pixel_std)
        if self.ensemble_size > 1:
            return Ensemble(lambda: self._build_member(input_shape, num_classes, 0.0, *constants), self.ensemble_size)
        return self._build_member(input_shape, num_classes, self.dropout, *constants)

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
        if not is_image and not getattr(ENCODERS[self.encoder], "accepts_rows", False):
            raise InputError(f"encoder={self.encoder} needs images, but the data are rows of a table; set encoder=mlp")
        if not is_image and self.augment:
            raise InputError(f"augment={self.augment} needs images, but the data are rows of a table")
        image_size = input_shape[-1] if is_image else 1  # the features of a row are channels
        encoder = build_encoder(self.encoder, input_shape[0], image_size=image_size, **sizes)
        if not self.pretrained_weights:
            return encoder
        load_weights(encoder, self.pretrained_weights)
        return freeze_batch_norm_statistics(encoder) if self.frozen_batch_norm else encoder
