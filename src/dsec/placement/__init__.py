"""Choosing a node for a sandbox."""

from dsec.placement.choose import NodeView, Overlay, PlacementRequest, Refusal, choose
from dsec.placement.placer import Placer

__all__ = ["NodeView", "Overlay", "PlacementRequest", "Placer", "Refusal", "choose"]
