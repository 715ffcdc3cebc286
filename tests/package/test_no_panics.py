"""What ends in a panic of the native half is an exception of Python's."""

from __future__ import annotations

import gc

import pytest

import cgraph
from cgraph import _core, _driver
from cgraph._captures.last_stream import last_stream
from cgraph.errors import CgraphError, DriverError


class Growing:
    """A key that adds to a dictionary whenever it is compared."""

    of: dict[object, object] | None = None

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if self.of is not None and len(self.of) < 50:
            self.of[len(self.of)] = 1
        return isinstance(other, Growing)


def test_a_dictionary_that_a_comparison_changes_raises_nothing() -> None:
    pattern = ("constant", 1)
    key = Growing()
    entry = _core.Entry(
        [("dict", [(key, pattern), ("b", pattern)])],
        [],
        is_in_order=True,
        modes=(True, False, None),
        work=lambda *args: args,
        outputs=None,
        last_stream=last_stream(_driver.current()),
        lock=None,
    )
    dispatcher = cgraph.graphed(lambda x: x)
    dispatcher.add(entry)
    other = Growing()
    other.of = {other: 1, "b": 1}
    assert dispatcher(other.of) is other.of
    assert len(other.of) > 2


def test_an_operation_that_waits_for_its_device_gets_an_error() -> None:
    sim = _core.Sim()
    stream = _core.Stream(_core.Device.sim(sim))
    raised: list[BaseException] = []

    def waits() -> None:
        try:
            stream.synchronize()
        except BaseException as error:  # a panic is no Exception
            raised.append(error)

    sim.launch(stream, "waits", waits)
    stream.synchronize()
    assert [type(one) for one in raised] == [DriverError]
    assert "CUDA_ERROR_NOT_PERMITTED" in str(raised[0])


def test_what_the_simulator_does_not_allow_is_an_exception() -> None:
    device = _core.Device.sim(_core.Sim())
    theirs = _core.Stream(device)
    borrowed = _core.Stream(device, handle=theirs.handle)
    del theirs
    gc.collect()
    with pytest.raises(CgraphError, match="is not live"):
        borrowed.synchronize()
