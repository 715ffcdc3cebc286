"""The options of one capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cgraph._captures.label_recorder import LabelRecorder
    from cgraph._driver import OpenCapture, Pool

__all__ = ["CaptureOptions"]


class CaptureOptions(NamedTuple):
    """The options of one capture; the first three are those of ``CUDAGraph.capture_begin``.

    Attributes:
        pool: The pool of its memory; None for a new one.
        mode: The effect of unsafe calls meanwhile.
        checks_liveness: Replays check that memory from outside is there.
        generators: The generators it may draw from, besides the default one.
        labels: Records the origins of nodes; started inside the capture, stopped when it ends.
        statics: The tensors that replays copy to.
        resumes: A capture that has ended: this one uses its dispatch modes again, if it has any,
            and measures its bytes on.
        is_weighed: Its bytes are measured, which takes as long as a small capture.
        is_stage: It becomes a stage of a loop, which fills the words of random states.
    """

    pool: Pool | None = None
    mode: str = "global"
    checks_liveness: bool = False
    generators: Sequence[Any] = ()
    labels: LabelRecorder | None = None
    statics: Sequence[Any] = ()
    resumes: OpenCapture | None = None
    is_weighed: bool = False
    is_stage: bool = False
