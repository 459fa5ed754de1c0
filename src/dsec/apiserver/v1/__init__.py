"""REST, WebSocket and OpenAPI over the service."""

from dsec.apiserver.v1.app import ApiServer

__all__ = ["ApiServer"]
