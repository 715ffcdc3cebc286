"""Copies of replays on the simulator besides their own work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cgraph import _core, _torch
from cgraph._captures.fresh_results import Results
from cgraph.errors import ArgumentError

if TYPE_CHECKING:
    from cgraph.sim import Simulator

__all__ = ["Deliver", "Feed"]


class Feed:
    """A copier of tensors to static inputs, as work on the stream of the replay.

    Args:
        simulator: The device.
        statics: The static inputs.
    """

    def __init__(self, simulator: Simulator, statics: Sequence[torch.Tensor]) -> None:
        reader = _torch.tensor_reader()
        self._simulator = simulator
        self._statics = [(_core.Signature(reader, one), one.detach()) for one in statics]

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Enqueue the copies."""
        if len(tensors) != len(self._statics):
            raise ArgumentError(
                f"the number of tensors is {len(tensors)}, expected {len(self._statics)}, one for"
                " each static input"
            )
        copies = []
        pairs = zip(self._statics, tensors, strict=True)
        for index, ((signature, static), tensor) in enumerate(pairs):
            if signature.check(tensor, index)[0] != "same":
                copies.append((static, tensor.detach()))

        def run() -> None:
            # A hook before the replay may have taken the memory of a tensor away.
            for _, tensor in copies:
                memory = _torch.memory_of(tensor)
                if memory is not None and memory.nbytes() == 0 and tensor.numel():
                    raise ArgumentError(
                        "a tensor of the call has no memory when the replay copies it, expected"
                        f" that of {tuple(tensor.shape)}: a hook has taken it away"
                    )
            with torch.no_grad(), _torch.without_modes():
                # A tensor may lie in another static one.
                read = [one.clone() for _, one in copies] if copies[1:] else [copies[0][1]]
                for (static, _), tensor in zip(copies, read, strict=True):
                    # As on a GPU, where nothing asks for the mode.
                    with torch.inference_mode(static.is_inference()):
                        static.copy_(tensor)

        if copies:
            stream = self._simulator.stream_of_replay()
            self._simulator.core.launch(stream, "cg_inputs", run)


class Deliver:
    """A copier of results to new memory, as work on the stream of the replay.

    Args:
        simulator: The device.
        results: The memory of the results.
    """

    def __init__(self, simulator: Simulator, results: Results) -> None:
        self._simulator = simulator
        self._storages = results.storages

    def __call__(
        self, destinations: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Enqueue the copies, and complete them where replays are driven to their end."""
        owners = list(tensors)

        def run() -> None:
            pairs = zip(self._storages, destinations, strict=True)
            for (source, _), (destination, nbytes) in pairs:
                ctypes.memmove(destination, source, nbytes)
            # Nothing may free them before this.
            owners.clear()

        stream = self._simulator.stream_of_replay()
        self._simulator.core.launch(stream, "cg_outputs", run)
        if not self._simulator.asynchronous and not stream.is_capturing():
            stream.synchronize()
            self._simulator.core.raise_failure()
