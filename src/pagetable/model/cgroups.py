"""The control groups that limit this process on Linux: where a container's share of memory and processors stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that may limit `controller` ("memory", "cpu"), from the innermost to the top.

    In a container the path is often the host's, and not there: then only the top exists, and it is ours. Nothing where
    there are no groups; a folder need not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = top / path.lstrip("/")
        for group in [inner, *inner.parents]:
            if group.is_relative_to(top):
                yield version, group
