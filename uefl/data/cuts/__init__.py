"""Ways to cut images into silos. A cut sees labels, splits and domains, and answers with positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from uefl.data.cuts.domains import domains
from uefl.data.cuts.given import given
from uefl.data.cuts.held_out import ghifary, held_out
from uefl.data.cuts.skew import classes, dirichlet, fedbr, fedcr, quantity, vhl
from uefl.data.images import Images
from uefl.data.share import Share

if TYPE_CHECKING:
    from uefl.data.spec import Data

CUTS: dict[str, Callable[[Data, Images, int], list[Share]]] = {
    "domains": domains,  # a few silos of each domain, sizes as told: the paper's
    "quantity": quantity,  # sizes from Dir(alpha)
    "dirichlet": dirichlet,  # labels from Dir(alpha), equal sizes, silo by silo
    "vhl": vhl,  # labels from Dir(alpha) a class, unequal sizes
    "fedbr": fedbr,  # labels from Dir(alpha · what is left), equal sizes
    "fedcr": fedcr,  # labels from Dir(alpha), equal sizes, all silos dealt to at once
    "classes": classes,  # `labels` consecutive classes a silo
    "held-out": held_out,  # one domain tests only; DomainBed's Rotated MNIST, PACS, and many silos dealt greedily
    "ghifary": ghifary,  # the same 1000 images in every domain
    "given": given,  # as the source names them
}
