"""The configuration of models in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import Self

from cgraph._piecewise.split import operator_name
from cgraph._text import nearest
from cgraph.errors import ArgumentError

__all__ = ["PiecewiseConfig"]


@dataclass(frozen=True, kw_only=True)
class PiecewiseConfig:
    """The configuration of a :class:`PiecewiseBackend`; it can be hashed and compared.

    Attributes:
        splitting_ops: The operators that run eagerly between pieces, as
            :func:`cgraph.piecewise.split_graph` takes them; kept as names.
        merge_splits: Let splitting operators that follow each other be one part.
        capture_sizes: The sizes whose calls are captured. Others run the code for any size.
        compile_sizes: The sizes that pieces are compiled for once more, each by itself.
        warmups: The number of calls of a size that run uncaptured before its capture.
        compiler: ``"inductor"``, or ``"eager"`` for operators as they are. The simulator, which
            sees operators only, takes ``"inductor"`` for ``"eager"``.
        inductor_options: Options of Inductor, as pairs or as a mapping. A pass of one's own, as
            ``post_grad_custom_post_pass``, sees each piece; with a cache it needs a ``uuid()``, as
            of ``torch._inductor.custom_graph_pass.CustomGraphPass``.
        copy_inputs: Copy inputs that have the open size to memory that stays. Without, a call is
            refused whose inputs have moved since the capture.
        outputs: ``"fresh"`` results are the caller's own, ``"static"`` ones are overwritten by the
            next call.
        cache: Keep compiled pieces on disk, for the next start.
        cache_dir: The folder of these caches, in place of ``CGRAPH_CACHE_DIR`` and
            ``~/.cache/cgraph``.
        graph_file: A file that keeps the graphs of :meth:`PiecewiseBackend.warm_up` for the next
            process, as :meth:`cgraph.GraphLadder.kept_in`, one for each rank. It can have those of
            models without splitting operators.
        dump: A folder for ``traced_graph.py`` and ``computation_graph.py``, the code of the graph
            before and after the split; by default that of the cache, if there is one.

    Raises:
        ArgumentError: A value is not what was expected, or contradicts another one.
    """

    splitting_ops: tuple[str, ...] = ()
    merge_splits: bool = False
    capture_sizes: tuple[int, ...] = ()
    compile_sizes: tuple[int, ...] = ()
    warmups: int = 1
    compiler: Literal["inductor", "eager"] = "inductor"
    inductor_options: tuple[tuple[str, Any], ...] = ()
    copy_inputs: bool = True
    outputs: Literal["fresh", "static"] = "fresh"
    cache: bool = True
    cache_dir: str | None = None
    graph_file: str | None = None
    dump: str | None = None

    def __post_init__(self) -> None:
        ops = self.splitting_ops
        if isinstance(ops, str) or not isinstance(ops, Iterable):
            raise ArgumentError(f"splitting_ops is {ops!r:.80}, expected several operators")
        set_ = object.__setattr__
        set_(self, "splitting_ops", tuple(dict.fromkeys(operator_name(one) for one in ops)))
        for name in ("capture_sizes", "compile_sizes"):
            set_(self, name, _sizes(name, getattr(self, name)))
        for name in ("merge_splits", "copy_inputs", "cache"):
            if not isinstance(given := getattr(self, name), bool):
                raise ArgumentError(f"{name} is {given!r:.80}, expected True or False")
        if type(self.warmups) is not int or self.warmups < 0:
            raise ArgumentError(f"warmups is {self.warmups!r:.80}, expected a number, at least 0")
        _choose("compiler", self.compiler, "inductor", "eager")
        _choose("outputs", self.outputs, "fresh", "static")
        set_(self, "inductor_options", _options(self.inductor_options))
        for name, value in self.inductor_options if self.cache else ():
            if callable(value) and _uuid_of(value) is None:
                raise ArgumentError(
                    f"{name} is {value!r:.80}, expected a pass with a uuid() that tells what it"
                    " does, as a torch._inductor.custom_graph_pass.CustomGraphPass has: compiled"
                    " pieces are kept on disk by it. Or set cache=False"
                )
        if self.cache_dir is not None and not self.cache:
            raise ArgumentError(
                f"cache_dir is {self.cache_dir!r:.80}, and cache is False: leave one of them out"
            )
        for name in ("compile_sizes", "inductor_options"):
            if self.compiler == "eager" and getattr(self, name):
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r:.80}, and compiler is 'eager', which"
                    " compiles nothing: leave one of them out"
                )

    def warmups_of(self, size: int) -> int:
        """Return how many calls of a size run before its capture, which allows no compilation."""
        return max(self.warmups, size in self.compile_sizes)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make a configuration of a mapping, as of a file.

        Raises:
            ArgumentError: A name is unknown; the text has the nearest one.
        """
        names = [one.name for one in fields(cls)]
        for name in given:
            if name not in names:
                near = nearest(name, names)
                hint = f": {near} is the nearest" if near else f": {', '.join(names)}"
                raise ArgumentError(f"no field of PiecewiseConfig is called {name!r:.80}{hint}")
        return cls(**given)


def _uuid_of(value: Any) -> Any:
    """Return the identifier of a pass; None if it has none."""
    uuid: Any = getattr(value, "uuid", None)
    return uuid() if callable(uuid) and not isinstance(value, type) else None


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    if isinstance(given, (str, int)) or not isinstance(given, Iterable):
        raise ArgumentError(f"{name} is {given!r:.80}, expected sizes, each at least 1")
    sizes = list(given)
    for one in sizes:
        if type(one) is not int or one < 1:
            raise ArgumentError(f"{name} has {one!r:.80}, expected sizes, each at least 1")
    return tuple(sorted(set(sizes)))


def _choose(name: str, given: Any, *choices: str) -> None:
    if given not in choices:
        near = nearest(given, choices)
        hint = f": {near!r} is the nearest" if near else ""
        expected = " or ".join(map(repr, choices))
        raise ArgumentError(f"{name} is {given!r:.80}, expected {expected}{hint}")


def _options(given: Any) -> tuple[tuple[str, Any], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        found = tuple(sorted((str(name), value) for name, value in pairs))
        hash(found)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"inductor_options is {given!r:.80}, expected names with values that can be hashed:"
            f" {error}"
        ) from None
    return found
