"""`python3 -m uefl.flower.superlink`: Flower's SuperLink, which also says when TLS turns somebody away.

A handshake that fails is over before Flower hears of it, and the event loop tells nobody outside its debug mode.
Whoever runs the coordinator must see that a node with the wrong authority or in plain text knocks.
"""

from __future__ import annotations

import ssl
from logging import WARNING

from flwr.supercore.logger import log
from flwr.superlink.cli.flower_superlink import flower_superlink


class Spoken(ssl.SSLObject):
    """A connection's TLS, with a line in the log if the handshake fails."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # not over yet
            raise
        except ssl.SSLError as e:
            log(WARNING, "A connection was refused, its TLS handshake failed: %s", e)
            raise


if __name__ == "__main__":
    ssl.SSLContext.sslobject_class = Spoken
    flower_superlink()
