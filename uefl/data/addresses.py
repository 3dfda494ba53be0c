"""The official public addresses, and the MD5 sums their publishers or torchvision give for the files."""

from __future__ import annotations

from uefl.download import Address

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # PyTorch's copy: the authors' own page no longer serves them
FMNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
GTSRB = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"
CIFAR = "https://www.cs.toronto.edu/~kriz/"

ADDRESSES: dict[str, tuple[Address, ...]] = {
    "mnist": (
        Address(MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Address(MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        Address(MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        Address(MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fmnist": (
        Address(FMNIST + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Address(FMNIST + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        Address(FMNIST + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        Address(FMNIST + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "emnist-letters": (
        Address("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),
    ),
    "cifar10": (Address(CIFAR + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    "cifar100": (Address(CIFAR + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    "gtsrb": (
        Address(GTSRB + "GTSRB-Training_fixed.zip", "513f3c79a4c5141765e10e952eaa2478"),
        Address(GTSRB + "GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185"),
        Address(GTSRB + "GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5"),
    ),
}
