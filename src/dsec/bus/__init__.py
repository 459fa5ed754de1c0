"""Control messages between the parts of dsec."""

from dsec.bus.edges import EdgeControl, serve_edge
from dsec.bus.interface import Bus, Subscription
from dsec.bus.local import LocalBus

__all__ = ["Bus", "EdgeControl", "LocalBus", "Subscription", "serve_edge"]
