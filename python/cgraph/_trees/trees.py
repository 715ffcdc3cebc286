"""The graph trees of all devices, and the steps of the program."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref

from cgraph import _driver, _torch
from cgraph._trees.graph_tree import GraphTree
from cgraph._trees.skips import forget_skips
from cgraph._trees.steps import follow_torch, steps
from cgraph.errors import CaptureError

__all__ = [
    "Owner",
    "all_trees",
    "owner",
    "reset_all",
    "tree_of",
]


class Owner:
    """A thread that calls functions of trees, with those threads that autograd runs for it.

    When the thread has ended, the next new one takes its place: a server with a thread for each
    request has as many trees as requests at once.

    Attributes:
        trees: Its trees, by driver and device.
        of: The thread.
        thread: Its number.
    """

    def __init__(self) -> None:
        # A tree lives as long as one of its functions.
        self.trees: weakref.WeakValueDictionary[tuple[int, int], GraphTree]
        self.trees = weakref.WeakValueDictionary()
        self.take(threading.current_thread())

    def take(self, thread: threading.Thread) -> None:
        """Belong to a thread from here on."""
        # Numbers of threads are used again.
        self.of, self.thread = thread, thread.ident


_owners: list[Owner] = []
_choosing = threading.Lock()


@atexit.register
def _leave_to_process() -> None:
    """Let no tree die at exit, when much of what its graphs need for that is gone."""
    _torch.leave_to_process(_owners)
    for one in _owners:
        for tree in one.trees.values():
            _torch.leave_to_process(tree)


def owner() -> Owner:
    """Return the owner of the trees that this thread uses."""
    found: Owner | None = _torch.in_thread(_NAME)
    if found is None:
        # It counts as living from here on, also if Python has not made it.
        found = _chosen(threading.current_thread())
        _torch.put_in_thread(_NAME, found)
    return found


def _chosen(thread: threading.Thread) -> Owner:
    """Return the owner of a thread: its own, that of a thread that has ended, or a new one."""
    with _choosing:
        # A backward pass forgets at its end what its thread was given.
        for one in _owners:
            if one.of is thread:
                return one
        for one in _owners:
            if not one.of.is_alive():
                one.take(thread)
                for tree in list(one.trees.values()):
                    # Its backward passes will not come any more.
                    tree.set_running_backward(None)
                return one
        _owners.append(Owner())
        return _owners[-1]


_NAME = "cgraph_trees"


def tree_of(device_index: int) -> GraphTree:
    """Return this thread's tree of a device of the driver in force."""
    follow_torch()
    driver, trees = _driver.current(), owner().trees
    key = _driver.number(), device_index
    found = trees.get(key)
    if found is None:
        _with_trees.add(key[0])
        found = trees[key] = GraphTree(driver, device_index, steps)
    return found


def all_trees() -> list[tuple[int, GraphTree]]:
    """Return the trees of the driver in force, of all threads, and their devices' numbers."""
    number = _driver.number()
    # Lists are made at once, whatever other threads do.
    refs = [(ref.key, ref()) for one in list(_owners) for ref in one.trees.valuerefs()]
    found = [(device, tree) for (of, device), tree in refs if of == number and tree is not None]
    return sorted(found, key=lambda item: item[0])


def reset_all() -> None:
    """Drop all graphs of the trees of the driver in force, and forget marks of steps.

    The memory of trees that are gone is given back, too.
    """
    for _, tree in all_trees():
        tree.reset()
    forget_skips()
    follow_torch()
    steps.forget_marks()
    if _driver.number() in _with_trees:
        driver = _driver.current()
        # A capture allows no wait, and replays in flight keep their memory.
        with contextlib.suppress(CaptureError):
            driver.synchronize()
            driver.settle()
            driver.empty_cache()


# The numbers of the drivers that have had trees.
_with_trees: set[int] = set()
