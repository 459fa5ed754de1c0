"""Images by name, with a short memory: a batch a millisecond must not read the catalog's files each time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dsec.api.types import ImageInfo, ImageList
from dsec.apiserver.service.ports import Images
from dsec.iam import Action, Principal, Resource, authorize
from dsec.images.catalog import Environment

FRESH_S = 1.0
"""A name that was given to another environment is noticed after at most this."""
_MAX_NAMES = 1024


class ImageService:
    """Looks names up in the catalog."""

    def __init__(self, catalog: Images, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog = catalog
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[Environment, float]] = {}

    async def resolve(self, name: str, *, project: str) -> Environment:
        """The environment of that name. Raises InvalidRequest or ImageError."""
        found = self._known.get((project, name))
        now = self._clock()
        if found is not None and found[1] > now:
            return found[0]
        environment = await asyncio.to_thread(self._catalog.resolve, name, project=project)
        if len(self._known) >= _MAX_NAMES:
            self._known.clear()
        self._known[project, name] = (environment, now + FRESH_S)
        return environment

    async def list(self, principal: Principal) -> ImageList:
        """All images of the project."""
        authorize(principal, Action.IMAGES, Resource("project", principal.project, principal.project))
        return await asyncio.to_thread(self._list, principal.project)

    def _list(self, project: str) -> ImageList:
        return ImageList(
            images=[
                ImageInfo(
                    name=environment.name,
                    layers=environment.layers,
                    size=self._catalog.size(environment),
                    created_at=environment.created_at,
                    env=environment.env,
                    workdir=environment.workdir,
                    user=environment.user,
                )
                for environment in self._catalog.list(project=project)
            ]
        )
