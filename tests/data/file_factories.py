"""Make small files in the public layouts."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib

import numpy as np
from PIL import Image


def make_pixels(seed, shape=(8, 8, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode_image(array, format="PNG", **options):
    out = io.BytesIO()
    (array if isinstance(array, Image.Image) else Image.fromarray(array)).save(out, format, **options)
    return out.getvalue()


def make_png(seed, shape=(8, 8, 3)):
    return encode_image(make_pixels(seed, shape))


def make_16bit_png(channels):
    """Make a PNG with 16 bits per channel; Pillow cannot write such color images, and silently reads them as 8 bits."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 4, 4, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + bytes(range(8 * channels)) for _ in range(4))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path, files, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def encode_idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def make_idx_files(labels=(0, 1, 2, 9), *, compressed=True, prefix="", first_label=0, size=4):
    """Make training and test files with one random image per label."""
    files = {}
    for number, split in enumerate(("train", "t10k" if not prefix else "test")):
        x = make_pixels(number, (len(labels), size, size))
        y = np.array(labels, dtype=np.uint8) + first_label
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            name = f"{prefix}{split}-{kind}-ubyte" + (".gz" if compressed else "")
            files[name] = gzip.compress(encode_idx(array), mtime=0) if compressed else encode_idx(array)
    return files


def make_cifar_files(classes=10, fine=False):
    """Make the official members with two images per batch."""
    names = [b"class%02d" % i for i in range(classes)]

    def batch(seed):
        labels = [seed % classes, (seed + 1) % classes]
        key = b"fine_labels" if fine else b"labels"
        return pickle.dumps(
            {b"data": make_pixels(seed, (2, 3072)), key: labels, b"filenames": [b"a", b"b"]}, protocol=2
        )

    if fine:
        meta = pickle.dumps({b"fine_label_names": names}, protocol=2)
        members = {"train": batch(0), "test": batch(1000), "meta": meta}
        return {f"cifar-100-python/{k}": v for k, v in members.items()}
    members = {f"data_batch_{i}": batch(i - 1) for i in range(1, 6)}
    members |= {"test_batch": batch(2000), "batches.meta": pickle.dumps({b"label_names": names}, protocol=2)}
    return {f"cifar-10-batches-py/{k}": v for k, v in members.items()}


def make_python2_batch(labels=(0, 1)):
    """Make a batch as Python 2 wrote the official ones: strings are bytes, and numpy has its old module names."""
    raw = make_pixels(7, (2, 3072)).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    label_list = b"](" + b"".join(b"K" + bytes([v]) for v in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + label_list + b"u."


def make_gtsrb_files(classes=(0, 1, 42)):
    files = {}
    header = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
    test_rows = header
    for i, c in enumerate(classes):
        rows = header
        for j in range(2):
            shape = (20 + 3 * i, 25 + j, 3)
            files[f"GTSRB/Training/{c:05d}/{j:05d}_00000.ppm"] = encode_image(make_pixels(10 * i + j, shape), "PPM")
            rows += f"{j:05d}_00000.ppm;{shape[1]};{shape[0]};5;5;15;15;{c}\n"
        files[f"GTSRB/Training/{c:05d}/GT-{c:05d}.csv"] = rows.encode()
        files[f"GTSRB/Final_Test/Images/{i:05d}.ppm"] = encode_image(make_pixels(900 + i, (30, 30, 3)), "PPM")
        test_rows += f"{i:05d}.ppm;30;30;5;5;25;25;{c}\n"
    files["GT-final_test.csv"] = test_rows.encode()
    return files
