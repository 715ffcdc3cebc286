"""What to do about a key of a graphed function, in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cgraph._text import in_time, plural

if TYPE_CHECKING:
    from cgraph.reports import KeyReport, Rerecording

__all__ = ["FIXES", "advice", "in_words"]

_NEW_EACH_TIME = (
    "give as tensors the numbers that change; read counts for a log in an eager_break, or outside;"
    " an object that is made anew for each call is another one, unless its class compares values,"
    " as a frozen dataclass or a NamedTuple does"
)

FIXES = {
    "larger than all sizes": "add a size that is large enough to sizes=; if these are no rows, name"
    " the arguments that have some: dim={name: 0}",
    "too many keys": f"give sizes=, so that calls share graphs, and {_NEW_EACH_TIME}",
    "moved too often": "write to it in place, with copy_(), so that it stays where it is; let a"
    " number that changes, as a learning rate, be a tensor; an argument need not be declared"
    " static, and hooks are best added once, before the first call",
    "below another decorator": "let @cgraph.graphed be the outermost decorator of the method; of a"
    " property, graph a method that it calls",
    "tensors inside": "pass them as arguments of their own, let the class be a dataclass without"
    " slots, or register it with torch.utils._pytree.register_pytree_node; where each call has the"
    " same object, as a cache, let the function close over it",
    "no memory of its own": "pass the tensors that it consists of, or a dense copy",
    "attributes of a tensor": "pass what they hold as arguments of their own",
    "more than its elements": "pass the tensors that it consists of, or a dense copy",
    "TorchScript": "graph the module that was scripted: replays run no Python in between either",
    "an iterator": "pass a list or a tuple",
    "no elements": "nothing: there is no work to save",
    "tensor elsewhere": "move the tensor to the device before the call",
    "CPU tensor": "move the tensor to the device before the call",
    "a break in a function whose": "call without debug=, under torch.no_grad(), or graph what is"
    " before and behind the break on its own",
    "no rows": "nothing: there is no work to save",
    "the result has": "return tensors, numbers, strings, and tuples, lists or dictionaries of them",
    "raised": "mend what raised, or mark the work with @cgraph.eager_break, and call reset();"
    " cgraph.explain(fn, *args) lists the operators that a capture refuses",
    "another thread captures": "nothing, or .capture() it ahead of time, while none does",
    "hooks see what autograd saves": "capture it ahead of time with .capture(), where none look on",
    "until its next call": "nothing, unless each call does so: then do what the reason says, or do"
    " that before the call",
    "padding": "let padding rows write nothing that others read, give pad= what does no harm,"
    " sizes= without gaps, or check_padding=False if no such row matters",
}
"""What to do about a key that runs eagerly, by the words that its reason begins with."""

# What such a reason goes on with says what to do.
_OF_FUNCTION = "raised in the capture: CaptureError: the function"
_AS_SAID = (
    "do what the reason says, and call reset(); where Python is to run in each call, as for a log,"
    " mark that with @cgraph.eager_break"
)
_OF_MANY = "too many keys"
_AHEAD = (
    "capture all sizes ahead of time with .capture(), which needs a max_graphs= with room for them,"
    f" and {_NEW_EACH_TIME}"
)
_OF_MEMORY = "raised in the capture: OutOfMemoryError"
_MORE_ROOM = (
    "give the pool or the device more room: fewer or smaller sizes=, max_graphs= or max_bytes=, a"
    " larger limit= of the pool; then call reset()"
)
_UNDECIDED = (
    "capture it ahead of time with .capture(), outside of checkpoints and while no other thread"
    " captures into its pool"
)
_ELSE = "see what a capture refuses, and the fix of each: cgraph.explain(fn, *args)"
# What to do about a key that is seldom replayed, without and with sizes=.
_SELDOM = (
    "leave it eager, or give sizes= so that more calls share a graph",
    "nothing if its calls are still to come; else leave its size out of sizes=, so that its calls"
    " are padded to a larger one",
)
# Each costs a capture; the first few may be a start that had to settle.
_MANY = 3


def advice(key: KeyReport) -> str | None:
    """What to do about a key; None if it is fine."""
    if key.state == "eager":
        if key.fix is not None:
            return f"{key.fix}; or mark the work with @cgraph.eager_break. Then call reset()"
        if key.reason is None:
            return _UNDECIDED
        return _AHEAD if key.has_sizes and key.reason.startswith(_OF_MANY) else _fix(key.reason)
    if key.saved_seconds is not None and key.saved_seconds <= 0:
        return f"do not graph this: {_comparison(key.graph_seconds, key.eager_seconds)}"
    found = _about_rerecordings(key.rerecorded, key.has_sizes)
    captures = 1 + sum(one.count for one in key.rerecorded)
    if key.replays <= captures:
        found.append(f"{_about_seldom(key, captures)}: {_SELDOM[key.has_sizes]}")
    return "; ".join(found) or None


def in_words(argument: str) -> str:
    """An argument by its name, or what else has moved, which has more than a name."""
    return argument if " " in argument else f"argument {argument}"


def _keep(argument: str) -> str:
    if " " in argument:
        return "change it less often, or once before the first call"
    return (
        "keep it at one address and change it in place, with copy_(), or declare as static only"
        " what stays where it is"
    )


def _fix(reason: str) -> str:
    """The fix of the reason that a reason begins with."""
    if reason.startswith(_OF_FUNCTION):
        return _AS_SAID
    if reason.startswith(_OF_MEMORY):
        return _MORE_ROOM
    known = (fix for words, fix in FIXES.items() if reason.lower().startswith(words.lower()))
    return next(known, _ELSE)


def _comparison(graph: float | None, eager: float | None) -> str:
    graph_text, eager_text = in_time(graph or 0.0), in_time(eager or 0.0)
    than = f"eager {eager_text}" if graph_text != eager_text else "as eager does"
    return f"a replay takes {graph_text}, {than}"


def _about_seldom(key: KeyReport, captures: int) -> str:
    """What is to be said of captures that no more than one replay each has made use of."""
    took = in_time(key.capture_seconds)
    if captures == 1:
        return f"captured in {took} and never replayed{' again' if key.replays else ''}"
    return f"captured {captures:,} times in {took} for {plural(key.replays, 'replay')}"


def _about_rerecordings(rerecorded: tuple[Rerecording, ...], has_sizes: bool) -> list[str]:
    """What to do about arguments, or evictions, that made a key be captured many times."""
    arguments, evicted = Counter[str](), 0
    for one in rerecorded:
        if one.argument is not None:
            arguments[one.argument] += one.count
        elif one.reason == "evicted":
            evicted += one.count
    found = [
        f"{in_words(argument)} made it be captured again {count:,} times: {_keep(argument)}"
        for argument, count in arguments.most_common()
        if count >= _MANY
    ]
    if evicted >= _MANY:
        found.append(
            f"evicted and captured again {evicted:,} times: raise max_graphs or max_bytes, or give"
            f" {'fewer ' if has_sizes else ''}sizes= so that more calls share a graph"
        )
    return found
