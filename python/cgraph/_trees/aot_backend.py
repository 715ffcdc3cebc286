"""The backend ``cgraph_aot`` of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._trees.aot_graphs import cudagraphs
from cgraph._trees.backend import follow_resets, name_of
from cgraph._trees.options import TreeOptions
from cgraph._trees.skips import skip_without_gpu
from cgraph._trees.trees import reset_all
from cgraph.errors import ArgumentError

__all__ = ["cgraph_aot_backend"]


class _AotBackend:
    """A compiler for ``torch.compile``: AOTAutograd's graphs in captures, without generated code.

    It compiles in a fraction of the time that Inductor takes, results are those of the operators,
    and they stay right for good.
    """

    compiler_name = "cgraph_aot"

    def __call__(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's.

        Args:
            graph_module: The graph.
            inputs: Its example inputs.
            options: Options of trees.
            mode: Always None: modes of ``torch.compile`` are for generated code.

        Raises:
            ArgumentError: An option or its value is not what was expected, or there is a mode.
        """
        if mode is not None:
            raise ArgumentError(
                f"mode is {mode!r:.80}, expected none: cgraph_aot generates no code that it is for"
            )
        settings = TreeOptions.of(options)
        follow_resets()
        name = name_of(graph_module)
        has_none = skip_without_gpu(name, settings)

        def compiled(
            graph: torch.fx.GraphModule, examples: Sequence[Any], mode: str, statics: Sequence[int]
        ) -> Callable[..., Any]:
            if has_none:
                return graph
            kind = "backward" if mode == "backward" else "inference"
            own = f"{name}, {mode}"
            return cudagraphs(
                graph, examples, statics=statics, name=own, mode=kind, options=settings
            )

        return _torch.compile_with_aot(graph_module, inputs, compiled)

    def reset(self) -> None:
        """Drop all graphs, in the first ``torch.compiler.reset()`` after a compilation."""
        reset_all()


cgraph_aot_backend = _AotBackend()
