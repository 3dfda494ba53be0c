"""Weights trained on ImageNet see more in real photographs than random ones do."""

import os
import random
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from uefl.models.encoders import encoder
from uefl.models.weights import load_weights

TRAIN, TEST = 30, 20  # photographs of a class
FILES = {
    "vgg16": "vgg16_features_imagenet_fp16.safetensors",
    "resnet18": "resnet18_backbone_imagenet_fp16.safetensors",
}


def data() -> Path:
    if not os.environ.get("UEFL_DATA"):
        pytest.skip("UEFL_DATA names no folder with real data")
    return Path(os.environ["UEFL_DATA"])


def existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"no {path.name} in UEFL_DATA")
    return path


@pytest.fixture(scope="module")
def photographs() -> tuple[Tensor, Tensor]:
    """PACS photographs as ImageNet's networks want them, [class, i, 3, 96, 96], cut into train and test parts."""
    classes = defaultdict(list)
    with zipfile.ZipFile(existing(data() / "pacs.zip")) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("photo/") and name.endswith(".jpg"):
                classes[name.split("/")[1]].append(name)
        chosen = [random.Random(0).sample(names, TRAIN + TEST) for names in classes.values()]
        pixels = [[np.asarray(Image.open(archive.open(n)).convert("RGB")) for n in names] for names in chosen]
    x = torch.from_numpy(np.array(pixels)).movedim(-1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return x[:, :TRAIN], x[:, TRAIN:]


def probed(net: nn.Module, photographs: tuple[Tensor, Tensor]) -> float:
    """Test accuracy of a ridge regression on the features."""
    with torch.no_grad():
        train, test = (torch.stack([net(x) for x in part]) for part in photographs)  # [class, i, d]
    mean, std = train.mean((0, 1)), train.std((0, 1)) + 1e-6
    z, u = ((part.flatten(0, 1) - mean) / std for part in (train, test))
    classes = len(train)
    y = torch.eye(classes).repeat_interleave(TRAIN, 0) - 1 / classes
    ridge = torch.linalg.solve(z @ z.T + z.shape[1] * torch.eye(len(z)), y)  # dual: fewer images than features
    return ((u @ z.T @ ridge).argmax(1) == torch.arange(classes).repeat_interleave(TEST)).float().mean().item()


@pytest.mark.real
@pytest.mark.parametrize("name", FILES)
def test_trained_features_tell_photographs_apart(name: str, photographs: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    net = encoder(name, 3, size=96, pool=True).eval()
    by_chance = probed(net, photographs)
    report = load_weights(net, str(existing(data() / "weights" / FILES[name])))
    trained = probed(net, photographs)
    assert report.precision == "float16"
    assert report.ignored == 0
    assert report.loaded == len(net.state_dict())
    assert trained > max(0.85, by_chance + 0.2)
