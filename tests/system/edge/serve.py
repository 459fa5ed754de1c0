"""A process that runs an edge until it is killed: `python -m tests.system.edge.serve HOME COUNT`, prints the ids of its sandboxes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.system.edge.rig import Rig

from dsec.api.control import StopSandboxes


async def main(home: Path, count: int) -> None:
    """Start `count` sandboxes, then keep creating and ending others until killed."""
    rig = Rig(home)
    async with rig.edge(max_starting=16) as edge:
        boxes = await rig.start(edge, count)
        sys.stdout.write(" ".join(boxes) + "\n")
        sys.stdout.flush()
        while True:
            others = await rig.start(edge, 8)
            await asyncio.gather(*(edge.stop(_ids(box)) for box in others))


def _ids(box: str) -> StopSandboxes:
    return StopSandboxes(ids=(box,))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
