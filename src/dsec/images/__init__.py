"""Images: immutable EROFS layers named by digest, and a catalog of environments (lists of layers) by name."""

from dsec.images.bootstrap import bootstrap_debian
from dsec.images.catalog import Catalog, Environment
from dsec.images.layer import Layer, LayerStore

__all__ = ["Catalog", "Environment", "Layer", "LayerStore", "bootstrap_debian"]
