"""Official weights are downloaded once and verified. The server is local, so tests need no network."""

import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from uefl.core.errors import InputError
from uefl.models import torchvision_weights
from uefl.models.build import build_encoder
from uefl.models.pretrained_weights import load_weights
from uefl.models.torchvision_weights import fetch_torchvision_weights, weights_folder

BODY = bytes(range(256)) * 40
NAME = f"net-{sha256(BODY).hexdigest()[:8]}.pth"


class Server(ThreadingHTTPServer):
    """Serve one body, record the requested ranges, and close the connection after `limit` bytes."""

    body, limit, ranges = BODY, None, []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        requested = self.headers.get("Range", "")
        self.server.ranges.append(requested)
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested else 0
        rest = self.server.body[start:]
        self.send_response(416 if start and not rest else 206 if requested else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: self.server.limit])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.ranges = []
        monkeypatch.setattr(torchvision_weights, "BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        path = fetch_torchvision_weights(NAME)
        assert path == tmp_path / "weights" / NAME
        assert path.read_bytes() == BODY
    assert server.ranges == [""]
    assert [p.name for p in path.parent.iterdir()] == [NAME]


def test_an_interrupted_download_resumes(server: Server) -> None:
    server.limit = 1000
    with pytest.raises(InputError, match="the connection was lost after 1000 of 10240 bytes"):
        fetch_torchvision_weights(NAME)
    server.limit = None
    assert fetch_torchvision_weights(NAME).read_bytes() == BODY
    assert server.ranges == ["", "bytes=1000-"]


def test_a_complete_partial_file_is_only_verified(server: Server, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / f"{NAME}.part").write_bytes(BODY)
    assert fetch_torchvision_weights(NAME).read_bytes() == BODY
    assert server.ranges == []


def test_a_file_with_the_wrong_hash_is_rejected_and_deleted(server: Server, tmp_path: Path) -> None:
    server.body = BODY[::-1]
    with pytest.raises(InputError, match="does not match the published checksum"):
        fetch_torchvision_weights(NAME)
    assert list((tmp_path / "weights").iterdir()) == []
    (tmp_path / "weights" / NAME).write_bytes(BODY[:-1])
    with pytest.raises(InputError, match=f"{NAME} is damaged"):
        fetch_torchvision_weights(NAME)


def test_without_network_one_line_names_the_file_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    address = "http://127.0.0.1:9/"  # no server listens on this port
    monkeypatch.setattr(torchvision_weights, "BASE_URL", address)
    with pytest.raises(InputError) as error:
        load_weights(build_encoder("resnet18", 3), "imagenet")
    line = str(error.value)
    assert f"{address}resnet18-f37072fd.pth" in line
    assert line.endswith(f"save that file as {tmp_path / 'weights' / 'resnet18-f37072fd.pth'}")
    assert "\n" not in line


def test_imagenet_loads_the_official_file_of_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    trained, net = build_encoder("vgg11", 3), build_encoder("vgg11", 3)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    net.torchvision_file = f"vgg11-{sha256((tmp_path / 'w.pth').read_bytes()).hexdigest()[:8]}.pth"
    (tmp_path / "weights").mkdir()
    (tmp_path / "w.pth").rename(tmp_path / "weights" / net.torchvision_file)
    assert load_weights(net, "imagenet").file == tmp_path / "weights" / net.torchvision_file
    assert torch.equal(net.features[0].weight, trained.features[0].weight)


def test_an_encoder_without_official_weights_raises_an_input_error() -> None:
    for name in ("resnet18-cifar", "mlp"):
        with pytest.raises(InputError, match="no official weights"):
            load_weights(build_encoder(name, 3), "imagenet")


def test_the_weights_folder_is_in_the_data_folder_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UEFL_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights_folder() == Path.home() / ".cache/uefl/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert weights_folder() == Path("/cache/uefl/weights")
    monkeypatch.setenv("UEFL_DATA", str(tmp_path))
    assert weights_folder() == tmp_path / "weights"
