"""What is noted of operators: their numbers, and the origins of their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _core, _torch
from cgraph._operators.facts import operator_reader
from lab import Lab, fresh


def numbers(lab: Lab, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    found, _ = operator_reader(lab.device).split(args, kwargs)
    return found


class Notes:
    """Notes of a call that gets inputs; each is dense if it is contiguous."""

    def __init__(self, lab: Lab, *inputs: Tensor) -> None:
        self.reader = operator_reader(lab.device)
        self.origins: dict[int, tuple[Any, ...]] = {}
        self.made: dict[int, _torch.WeakStorage] = {}
        for place, one in enumerate(inputs):
            self.origins[number(one)] = "input", place
        self.native = _core.OperatorNotes(
            self.reader,
            {id(one): ("input", place) for place, one in enumerate(inputs)},
            self.origins,
            self.made,
            _torch.WeakStorage,
            [int(one.storage_offset()) if one.is_contiguous() else None for one in inputs],
        )

    def take(self, *args: Any, outside: int = 0) -> tuple[Any, ...]:
        return self.native.take(args, {}, outside)[1]


def number(tensor: Tensor) -> int:
    return _torch.storage_id(tensor.untyped_storage())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (None, False),
        ("a", "b"),
        (1.0, 1.0 + 2e-16),
        (1j, 1.0),
    ],
)
def test_numbers_are_told_apart_by_type_and_value(lab: Lab, one: Any, other: Any) -> None:
    assert numbers(lab, one) == numbers(lab, one)
    assert numbers(lab, one) != numbers(lab, other)


def test_a_number_that_is_no_number_equals_itself(lab: Lab) -> None:
    assert numbers(lab, float("nan")) == numbers(lab, float("nan"))


def test_lists_and_arguments_by_name_are_taken_apart_in_order(lab: Lab) -> None:
    x, y = fresh(lab, 2), fresh(lab, 3)
    reader = operator_reader(lab.device)
    found, tensors = reader.split(([x, (1, y)], 2), {"by": 3, "of": {"name": x}})
    assert found == ((int, 1), (int, 2), "by", (int, 3), "of", "name")
    assert [id(one) for one in tensors] == [id(x), id(y), id(x)]


def test_a_generator_counts_as_its_own_number(lab: Lab) -> None:
    one, other = torch.Generator(lab.device), torch.Generator(lab.device)
    assert numbers(lab, one) == (one._cdata,) != numbers(lab, other)  # type: ignore[attr-defined]


def test_a_host_number_counts_by_its_value() -> None:
    reader = operator_reader("cuda")
    value, vector = torch.tensor(2.5), torch.ones(1)
    found, tensors = reader.split((value, vector), {})
    assert found == ((float, "2.5"),)
    assert [id(one) for one in tensors] == [id(value), id(vector)]
    assert reader.devices == [torch.device("cpu")]


def test_a_view_of_an_input_is_noted_by_its_place_there(lab: Lab) -> None:
    x = fresh(lab, 3, 4)[1:]
    notes = Notes(lab, x)
    whole, part = notes.take(x, x[1])
    assert whole == (("input", 0),)
    assert part == (("input", 0), 4, torch.Size([4]), x.dtype)


def test_of_an_input_whose_copy_has_other_strides_no_offset_counts(lab: Lab) -> None:
    x = fresh(lab, 3, 4).t()
    (part,) = Notes(lab, x).take(x[1])
    assert part == (("input", 0), None, torch.Size([3]), x.dtype)


def test_memory_from_outside_is_numbered_in_the_order_of_its_first_use(lab: Lab) -> None:
    x, y = fresh(lab, 2), fresh(lab, 4)
    notes = Notes(lab)
    _, origins, given, new = notes.native.take((y, x[1:], y[2:]), {}, 5)
    assert [one[:2] for one in origins] == [
        (("outside", 5), 0),
        (("outside", 6), 1),
        (("outside", 5), 2),
    ]
    assert given == [number(y), number(x), number(y)]
    assert [(one, origin) for one, origin, _ in new] == [
        (number(y), ("outside", 5)),
        (number(x), ("outside", 6)),
    ]
    notes.origins |= {one: origin for one, origin, _ in new}
    assert not notes.native.take((x,), {}, 7)[3]


def test_an_operator_makes_the_storages_that_it_did_not_get(lab: Lab) -> None:
    x, y = fresh(lab, 2), fresh(lab, 2)
    notes = Notes(lab)
    notes.native.make([y, {"of": x}], [number(y)], 3)
    assert {*notes.made} == {number(x)}
    assert notes.take(x)[0][:2] == (("operator", 3, 1), 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_memory_are_noted_by_what_they_are(lab: Lab) -> None:
    notes = Notes(lab)
    meta, sparse = torch.empty(2, device="meta"), fresh(lab, 2).to_sparse()
    nested = torch.nested.nested_tensor([fresh(lab, 2), fresh(lab, 3)])
    assert notes.take(meta) == ((("other", "Tensor"), torch.Size([2]), meta.dtype),)
    assert notes.take(sparse) == ((("other", "Tensor"), torch.Size([2]), sparse.dtype),)
    assert not notes.native.has_nested
    assert notes.take(nested) == ((("other", "nested tensor"), nested.dtype),)
    assert notes.native.has_nested


def test_a_tensor_of_zeros_without_memory_is_noted_by_what_it_is(lab: Lab) -> None:
    zeros = torch._efficientzerotensor(2, 3, device=lab.device)  # type: ignore[call-overload]
    notes = Notes(lab)
    assert notes.take(zeros) == ((("other", "Tensor"), torch.Size([2, 3]), zeros.dtype),)
    notes.native.make(zeros, (), 1)
    assert not notes.made and not notes.origins


def test_forward_derivatives_are_replayed(lab: Lab) -> None:
    weight = fresh(lab, 4, 4)

    def derivative(x: Tensor) -> Tensor:
        found: tuple[Tensor, Tensor]
        found = torch.func.jvp(lambda y: torch.tanh(y @ weight), (x,), (torch.ones_like(x),))
        return found[1]

    graphed = cgraph.graphed(derivative)
    for _ in range(4):
        x = fresh(lab, 4, 4)
        assert torch.allclose(graphed(x), derivative(x))
    assert graphed.report().captured == 1


def test_a_tensor_that_cannot_be_read_leaves_nothing_noted(lab: Lab) -> None:
    class Bad(Tensor):
        @property
        def shape(self) -> torch.Size:  # type: ignore[override]
            raise ValueError("no shape")

    x, y = fresh(lab, 2), fresh(lab, 3)
    notes = Notes(lab)
    with pytest.raises(ValueError, match="no shape"):
        notes.take(x, fresh(lab, 2).as_subclass(Bad))
    assert not notes.origins
    assert notes.take(y)[0][0] == ("outside", 0)


def test_lists_without_an_end_are_refused_as_pythons_recursion_is(lab: Lab) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError, match="500 lists deep"):
        numbers(lab, endless)
    with pytest.raises(RecursionError):
        Notes(lab).native.make(endless, (), 0)


def test_dictionaries_are_read_by_their_own_methods(lab: Lab) -> None:
    class Own(dict[str, int]):
        def items(self) -> Any:
            return iter([("other", 9)])

    assert numbers(lab, Own(a=1)) == ("other", (int, 9))


def test_the_value_of_a_host_number_counts_also_where_tensors_are_read_by_torch_alone() -> None:
    classes = torch.Generator, torch.ScriptObject
    plain = [Tensor, nn.Parameter]
    tensors = _core.TensorReader(Tensor, None)
    reader = _core.OperatorReader(tensors, plain, *classes, _torch.memory_of, "cuda")
    assert reader.split((torch.tensor(2.5),), {})[0] == ((float, "2.5"),)


def test_a_class_of_the_users_is_noted_as_torchs_own(lab: Lab) -> None:
    class Own(Tensor):
        pass

    x = fresh(lab, 2, 3)
    own, weight = x.as_subclass(Own), nn.Parameter(x)
    notes = Notes(lab)
    plain, *others = notes.take(x[:, 1], own[:, 1], weight[:, 1])
    assert plain == (("outside", 0), 1, torch.Size([2]), x.dtype)
    assert others == [plain, plain]
    assert notes.reader.devices == [x.device]
