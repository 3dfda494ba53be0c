"""Images, and how they are cut into silos."""

from uefl.data.cuts import CUTS
from uefl.data.defaults import defaults
from uefl.data.images import Images
from uefl.data.sources import SOURCES
from uefl.data.spec import Data

__all__ = ["CUTS", "SOURCES", "Data", "Images", "defaults"]
