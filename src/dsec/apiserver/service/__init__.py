"""What the control plane does, whatever the ingress."""

from dsec.apiserver.service.records import StoreSink
from dsec.apiserver.service.service import Service

__all__ = ["Service", "StoreSink"]
