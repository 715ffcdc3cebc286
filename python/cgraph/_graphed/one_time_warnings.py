"""``OneTimeWarnings``: warnings, each given once, about eager calls and other problems."""

from __future__ import annotations

import warnings

from cgraph._graphed.key import Key, Reason
from cgraph._graphed.options import Options
from cgraph._python.places import MOST_PLACES
from cgraph._source import levels_to_user, user_line
from cgraph.errors import CaptureError, EagerWarning, PlacesWarning, ResultWarning

__all__ = ["OneTimeWarnings"]


class OneTimeWarnings:
    """The warnings of one function, each given once."""

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._raises = options.on_fail == "raise"
        self._told: set[str] = set()

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
        if self._raises and counts:
            raise CaptureError(reason.told(f"{self._name} cannot be captured for ({key.text})"))
        text = reason.told(f"{self._name} runs eagerly for ({key.text})")
        self._say(reason.text, text, EagerWarning)

    def of_places(self, stopped: str | None) -> None:
        """Warn that places from the one of this name on are not compared; not if it is None."""
        if stopped is None:
            return
        text = (
            f"{self._name} reads more than {MOST_PLACES:,} places, and those from {stopped} on are"
            " not compared: replays use their values at the capture. Fix: keep large tables in a"
            f" tensor, or exclude them from the guards: guards={{{stopped!r}: False}}"
        )
        self._say("places", text, PlacesWarning)

    def of_held(self) -> None:
        """Warn that a static result is still held."""
        text = (
            f"a result of {self._name} from the last call but one is still held, and each call"
            ' overwrites it. Fix: clone what is kept, or take outputs="fresh"'
        )
        self._say("held", str(Reason(text, user_line())), ResultWarning)

    def _say(self, what: str, text: str, kind: type[Warning]) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(text, kind, stacklevel=levels_to_user())
