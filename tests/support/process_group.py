"""A process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

# torch ends a group by waiting for its threads with the interpreter held, and one of them may need
# the interpreter to give up the tensors that it reduced last: no group ends before the process.
_groups: list[object] = []


def keep_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the groups of a program live as long as the process."""
    begin = dist.init_process_group

    def begin_and_keep(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        _groups.append(dist.group.WORLD)

    monkeypatch.setattr(dist, "init_process_group", begin_and_keep)


@contextmanager
def only_process() -> Iterator[None]:
    """Be the only process of torch's default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _groups.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
