"""Train UEFL on your own silos, given as tensors, with your own encoder."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from uefl import UEFL, ExtensibleCodebook, LocalTraining, Silo, train

x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))  # 1797 digits of 8×8 pixels
x = (x.float().view(-1, 1, 8, 8) - 5) / 6
images = {"north": x[:600], "east": x[600:1200].rot90(1, (2, 3)), "south": x[1200:].rot90(2, (2, 3))}
labels = {"north": y[:600], "east": y[600:1200], "south": y[1200:]}
silos = [Silo.from_tensors(name, images[name], labels[name], domain=name) for name in images]
encoder = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1))
local, codebook = LocalTraining(lr=2e-3, batch_size=32), ExtensibleCodebook(num_codewords=64)
method = UEFL(rounds=6, extra_rounds=4, local=local, codebook=codebook)
result = train(method, silos, encoder, num_classes=10, hidden_size=64)

print(f"mean accuracy {result.accuracy:.3f}, mean entropy {result.entropy:.3f}")
model = result.model("north")  # with the codewords of this silo; `result.save(folder)` keeps it for `uefl.load`
prediction = model.predict(images["north"][:3].numpy())
for label, p, entropy in zip(prediction.labels, prediction.confidence, prediction.uncertainty.entropy):
    print(f"digit {label}: probability {p:.3f}, predictive entropy {entropy:.3f}")
