"""``OneTimeWarnings``: warnings, each given once, about eager calls and other problems."""

from __future__ import annotations

import logging

from cgraph._graphed.key import Key
from cgraph._graphed.options import Options
from cgraph._python.places import MOST_PLACES
from cgraph._reason import Reason
from cgraph._source import user_line
from cgraph.causes import Cause
from cgraph.errors import CgraphWarning, EagerWarning, PlacesWarning, ResultWarning

__all__ = ["OneTimeWarnings"]

_log = logging.getLogger("cgraph.graphed")


class OneTimeWarnings:
    """The warnings of one function, each given once."""

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._raises = options.on_fail == "raise"
        self._told: set[object] = set()

    def clear(self) -> None:
        """Forget which warnings were given."""
        self._told.clear()

    def of_eager(self, key: Key, reason: Reason | None, *, counts: bool = True) -> None:
        """Warn that calls run eagerly, with place, reason and remedy; or raise it each time.

        Args:
            key: The key of these calls.
            reason: The reason; None gives no warning.
            counts: True if it is a failure, which ``on_fail="raise"`` raises.

        Raises:
            CaptureError: It is a failure, and ``on_fail`` is ``"raise"``.
        """
        if reason is None:
            return
        raises, is_known = self._raises and counts, key.told == reason.text
        if is_known and not raises:
            return
        effect = f"{self._name} runs eagerly for ({key.text})"
        if not is_known:
            key.told = reason.text
            _log.info("%s", reason.told(effect))
        if raises:
            raise reason.error(f"{self._name} cannot be captured for ({key.text})")
        self._say(reason, EagerWarning, effect)

    def of_places(self, stopped: str | None) -> None:
        """Warn that places from the one of this name on are not compared; not if it is None."""
        if stopped is None:
            return
        text = (
            f"{self._name} reads more than {MOST_PLACES:,} places, and those from {stopped} on are"
            " not compared: replays use their values at the capture"
        )
        fix = (
            "keep large tables in a tensor, or exclude them from the guards:"
            f" guards={{{stopped.partition('[')[0]!r}: False}}"
        )
        self._say(Reason(Cause.MANY_PLACES, text, None, fix), PlacesWarning)

    def of_shapes(self, reason: Reason | None) -> None:
        """Warn that calls have only new shapes; not if there is no reason to."""
        if reason is not None and reason.text not in self._told:
            self._say(
                reason.at(user_line()), EagerWarning, f"Each of them ran {self._name} eagerly"
            )

    def of_held(self) -> None:
        """Warn that a static result is still held."""
        text = (
            f"a result of {self._name} from the last call but one is still held, and each call"
            " overwrites it"
        )
        self._say(Reason(Cause.HELD_RESULT, text, user_line()), ResultWarning)

    def _say(self, reason: Reason, kind: type[CgraphWarning], effect: str = "") -> None:
        """Warn, unless the same text, or the same cause at the same line, was told before."""
        about = {reason.text, (reason.cause, reason.line)}
        if not about & self._told:
            self._told |= about
            reason.warn(effect, kind)
