"""Access to torch's private names, with an error that says which one this torch lacks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch

from cgraph.errors import TorchError

try:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShape
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils.weak import TensorWeakRef as TensorWeakRef
except ImportError as error:
    raise TorchError(
        f"torch {torch.__version__} has no class that cgraph's own ones derive from: {error}. Fix:"
        " use a torch that this cgraph supports (2.8 to 2.15)"
    ) from error

__all__ = [
    "DataDependentOutput",
    "DynamicOutputShape",
    "FakeTensor",
    "FakeTensorMode",
    "PrivateNames",
    "TensorWeakRef",
    "TorchDispatchMode",
    "lacks",
    "of_autograd",
    "of_modes",
    "of_operators",
    "of_overrides",
    "of_torch",
    "torch_version",
]


class PrivateNames:
    """The names of one module of torch's, as attributes.

    Args:
        module: The module's name; what its parent has by that name is enough.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Find a name at its first use.

        Raises:
            TorchError: The module has no such name.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            value = getattr(_found(self._module), name)
        except (AttributeError, ImportError):
            raise lacks(f"{self._module}.{name}") from None
        vars(self)[name] = value
        return value

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function, or one that raises where there is none, to call without a look-up."""

        def missing(*_: object) -> Any:
            raise lacks(f"{self._module}.{name}")

        return getattr(_found(self._module), name, missing)

    def has(self, name: str) -> bool:
        """Return whether the module has a name."""
        return hasattr(_found(self._module), name)


def lacks(name: str) -> TorchError:
    """Return the error of a name that this torch lacks."""
    return TorchError(
        f"torch {torch.__version__} has no {name}, which cgraph needs: use a torch that this cgraph"
        " supports (2.8 to 2.15)"
    )


def torch_version() -> tuple[int, int]:
    """Return the first two numbers of torch's version; zeros if it has none."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _found(module: str) -> Any:
    parent, _, name = module.rpartition(".")
    found = getattr(importlib.import_module(parent), name, None)
    return importlib.import_module(module) if found is None else found


of_torch = PrivateNames("torch._C")
of_autograd = PrivateNames("torch._C._autograd")
of_modes = PrivateNames("torch.utils._python_dispatch")
of_operators = PrivateNames("torch._ops")
of_overrides = PrivateNames("torch.overrides")
