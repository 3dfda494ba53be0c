"""Images, and how they are cut into silos."""

from uefl.data.images import Images
from uefl.data.spec import SOURCES, Data

__all__ = ["SOURCES", "Data", "Images"]
