"""Ways of reading tensors, for the tests of them."""

from __future__ import annotations

import torch
from torch import Tensor

from cgraph import _core
from cgraph._torch.fields import tensor_fields
from cgraph._torch.native import stable_functions

EXCHANGE_API = getattr(Tensor, "__dlpack_c_exchange_api__", None)
# torch 2.8 has all but the layout; where there is DLPack's table, all are there.
HAS_STABLE_FUNCTIONS = EXCHANGE_API is not None or bool(stable_functions())


class Plain(Tensor):
    """A subclass without behaviour of its own."""


def samples() -> list[Tensor]:
    return [torch.empty(0), torch.nn.Parameter(torch.empty(0))]


def reader_by_fields() -> _core.TensorReader:
    return _core.TensorReader(Tensor, None, stable_functions(), samples(), tensor_fields())


def check(reader: _core.TensorReader, static: object, live: object) -> tuple[str, int]:
    return _core.Signature(reader, static).check(live, 3)
