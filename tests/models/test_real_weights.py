"""ImageNet weights give better features of real photographs than random weights."""

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

from uefl.models.build import build_encoder
from uefl.models.pretrained_weights import load_weights

NUM_TRAIN, NUM_TEST = 30, 20  # photographs per class
FILES = {
    "vgg16": "vgg16_features_imagenet_fp16.safetensors",
    "resnet18": "resnet18_backbone_imagenet_fp16.safetensors",
}


def get_data_folder() -> Path:
    if not os.environ.get("UEFL_DATA"):
        pytest.skip("UEFL_DATA is not set to a folder with real data")
    return Path(os.environ["UEFL_DATA"])


def require_file(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"no {path.name} in UEFL_DATA")
    return path


@pytest.fixture(scope="module")
def photographs() -> tuple[Tensor, Tensor]:
    """Return PACS photographs standardized as for ImageNet, [class, i, 3, 96, 96], split into train and test."""
    names_by_class = defaultdict(list)
    with zipfile.ZipFile(require_file(get_data_folder() / "pacs.zip")) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("photo/") and name.endswith(".jpg"):
                names_by_class[name.split("/")[1]].append(name)
        samples = [random.Random(0).sample(names, NUM_TRAIN + NUM_TEST) for names in names_by_class.values()]
        pixels = [[np.asarray(Image.open(archive.open(n)).convert("RGB")) for n in names] for names in samples]
    x = torch.from_numpy(np.array(pixels)).movedim(-1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return x[:, :NUM_TRAIN], x[:, NUM_TRAIN:]


def probe_features(net: nn.Module, photographs: tuple[Tensor, Tensor]) -> float:
    """Return the test accuracy of a ridge regression on the features."""
    with torch.no_grad():
        train, test = (torch.stack([net(x) for x in split]) for split in photographs)  # [class, i, d]
    mean, std = train.mean((0, 1)), train.std((0, 1)) + 1e-6
    z, u = ((features.flatten(0, 1) - mean) / std for features in (train, test))
    num_classes = len(train)
    y = torch.eye(num_classes).repeat_interleave(NUM_TRAIN, 0) - 1 / num_classes
    ridge = torch.linalg.solve(z @ z.T + z.shape[1] * torch.eye(len(z)), y)  # dual: fewer images than features
    return ((u @ z.T @ ridge).argmax(1) == torch.arange(num_classes).repeat_interleave(NUM_TEST)).float().mean().item()


@pytest.mark.real
@pytest.mark.parametrize("name", FILES)
def test_trained_features_separate_photographs(name: str, photographs: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    net = build_encoder(name, 3, image_size=96, average_pool=True).eval()
    random_accuracy = probe_features(net, photographs)
    report = load_weights(net, str(require_file(get_data_folder() / "weights" / FILES[name])))
    accuracy = probe_features(net, photographs)
    assert report.file_dtype == "float16"
    assert report.num_ignored == 0
    assert report.num_loaded == len(net.state_dict())
    assert accuracy > max(0.85, random_accuracy + 0.2)
