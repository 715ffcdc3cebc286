"""Functions of graph trees as compilers make them: they take a list of inputs and empty it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import cgraph
from lab import Lab, fresh

__all__ = ["Program", "boxed", "graphs_of", "half", "in_tree", "line", "step"]


def half(x: Tensor) -> Tensor:
    return torch.sin(x) * 0.5


def line(x: Tensor) -> Tensor:
    return x * 3 + 1


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
    """Return a function that takes a list and empties it, as compiled code does."""

    def run(args: list[Any]) -> list[Any]:
        taken = [*args]
        args.clear()
        # Without a name that keeps an input.
        result = function(*_popped(taken))
        return list(result) if isinstance(result, tuple) else [result]

    run.__qualname__ = function.__qualname__
    return run


def in_tree(
    lab: Lab, function: Callable[..., Any], *example: Any, **options: Any
) -> Callable[..., Any]:
    """Return a function whose calls are replays; it takes its inputs as arguments."""
    options.setdefault("is_inference", True)
    made = cgraph.trees.cudagraphify(boxed(function), list(example), **options)

    def call(*args: Any) -> Any:
        results = made([*args])
        return results[0] if len(results) == 1 else tuple(results)

    call.made = made  # type: ignore[attr-defined]
    return call


def step() -> None:
    cgraph.trees.mark_step_begin()


def graphs_of(function: Callable[..., Any]) -> int:
    """Return the number of graphs of a function of :func:`in_tree`."""
    made: Any = function.made  # type: ignore[attr-defined]
    return sum(of == made.id for _, _, of, _ in made.tree.nodes)


def _popped(taken: list[Any]) -> Iterator[Any]:
    while taken:
        yield taken.pop(0)


class Program:
    """A random program: the same calls of functions in each step, some of whose results it keeps.

    Args:
        lab: The driver.
        seed: Decides on all.
        functions: Functions of one tensor, each with an eager one that does the same.
    """

    def __init__(
        self, lab: Lab, seed: int, functions: list[tuple[Callable[[Tensor], Any], Any]]
    ) -> None:
        self._lab = lab
        self._functions = functions
        chosen = random.Random(seed)
        self._held: list[tuple[Tensor, Tensor]] = []
        self._is_interrupted = False
        # Function, the place of its input among what is held, and whether its result is held.
        self._branches = [
            [
                (chosen.randrange(len(functions)), chosen.randrange(4), chosen.random() < 0.6)
                for _ in range(chosen.randrange(1, 6))
            ]
            for _ in range(2)
        ]
        self._choose = chosen

    def run(
        self, steps: int, around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Run so many steps, and compare all that is held with eager at the end of each.

        Args:
            steps: Their number.
            around: Makes a context for each call; if that ends the call, this has no result, and
                what is held may raise.
        """
        for _ in range(steps):
            step()
            self._step(self._choose.choice(self._branches), around)

    def _step(
        self,
        calls: list[tuple[int, int, bool]],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        held = [(x, x.clone()) for x in (fresh(self._lab, 4, 4) for _ in range(2))]
        for number, place, keeps in calls:
            in_tree, eager = self._functions[number]
            given, wanted = held[place % len(held)]
            got, want = None, eager(wanted)
            with around():
                try:
                    got = in_tree(given)
                except RuntimeError as error:
                    self._allow(error)
            self._is_interrupted |= got is None
            del given
            if place % 3 == 0 and len(held) > 1:
                del held[place % len(held)]
            if got is None:
                continue
            assert torch.allclose(got, want, atol=1e-5)
            if keeps:
                held.append((got, want))
            del got
        for got, want in held + self._held:
            try:
                assert torch.allclose(got, want, atol=1e-5)
            except RuntimeError as error:
                self._allow(error)
        self._held = held[2:]

    def _allow(self, error: RuntimeError) -> None:
        assert self._is_interrupted, error
        assert "overwritten by a subsequent run" in str(error)
