"""``Cause``: why work stays out of a graph, or is wrong in replays; each has a code and a fix.

Messages end with the code's command, as ``(cgraph why CG-HOST-READ)``, which prints its page.
Errors and warnings have the member as ``cause``, reports and findings have its ``code``.

>>> Cause.HOST_READ.code
'CG-HOST-READ'
>>> Cause.of_code("CG-HOST-READ").fix
'return the tensor and read it after the replay'
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, NamedTuple

__all__ = ["Cause", "Severity"]

Severity = Literal["refused", "frozen", "eager", "told"]
"""``"refused"``: a capture fails there. ``"frozen"``: it goes on, and replays keep what was at the
capture. ``"eager"``: calls run without a graph. ``"told"``: calls are replays, and a warning comes.
"""


class _Facts(NamedTuple):
    severity: Severity
    what: str
    fix: str


def _refused(what: str, fix: str) -> _Facts:
    return _Facts("refused", what, fix)


def _frozen(what: str, fix: str) -> _Facts:
    return _Facts("frozen", what, fix)


def _eager(what: str, fix: str = "") -> _Facts:
    return _Facts("eager", what, fix)


def _told(what: str, fix: str) -> _Facts:
    return _Facts("told", what, fix)


@unique
class Cause(Enum):
    """The deed of a line or a call that keeps it from a graph, with the remedy."""

    # What a capture refuses or freezes, line by line.
    HOST_READ = _refused(
        "reads a value on the host, which waits for the device",
        "return the tensor and read it after the replay",
    )
    BRANCH = _refused(
        "lets a value on the device decide in Python, which waits for the device",
        "choose on the device with torch.where, or decide outside and capture each case",
    )
    WAIT = _refused(
        "waits for the device, or asks whether it has finished",
        "wait after the replay; inside, order streams with wait_stream()",
    )
    SHAPE = _refused(
        "makes a shape that depends on values, which the host must wait for",
        "keep the shape fixed: torch.where or a mask to multiply with, a size or output_size given",
    )
    HOST_COPY = _refused(
        "copies from host memory to the device",
        "make the tensor on the device before the capture, and copy new values in before a replay",
    )
    GENERATOR = _refused(
        "draws from a generator of its own",
        "draw from the default one, or call graph.register_generator_state(generator) before the"
        " capture",
    )
    SEED = _refused(
        "seeds random numbers or sets their state",
        "do it before the capture, or pass random numbers as an argument",
    )
    HOST_RANDOM = _frozen(
        "draws random numbers of Python: replays keep those of the capture",
        "draw torch's, or pass them as an argument",
    )
    OPTIMIZER = _refused(
        "steps an optimizer that counts its steps on the host",
        "make the optimizer with capturable=True",
    )
    UNJOINED_STREAM = _refused(
        "puts work on a forked stream that nothing waits for at the end",
        "let the capturing stream wait for it afterwards: stream.wait_stream(side)",
    )
    OUTSIDE_WAIT = _refused(
        "lets a stream of the capture wait for work that is not part of it",
        "fork the other stream first: side.wait_stream(stream)",
    )
    DEFAULT_STREAM = _refused(
        "lets the default stream wait for the capture, of which it cannot be part",
        "use a torch.cuda.Stream() in its place",
    )
    OUTSIDE_STREAM = _frozen(
        "puts work on a stream that the capture does not reach: no replay does it again",
        "let that stream wait for the capturing one first; it cannot be the default stream",
    )
    HOST_OPERAND = _frozen(
        "gives work of the device a tensor on the host: replays keep the value of the capture",
        "move the tensor to the device before the capture",
    )
    HOST_NUMBER = _frozen(
        "reads a number from a tensor on the host: replays keep it, and all branches on it",
        "keep the number in a tensor on the device, or capture a graph for each value",
    )
    FIRST_USE = _refused(
        "uses a library of CUDA's for the first time, in this thread or for such a shape, and it"
        " takes memory of its own",
        "call the function once before the capture, in the same thread",
    )
    PYTHON_STATE = _frozen(
        "changes a value of Python in the capture only: no replay does it again, but for attributes"
        " and items of dictionaries, to which replays of graphed assign",
        "return the value and change it after the call, or keep it in a tensor that is written in"
        " place; side_effects= lets graphed skip changes of plain values that nothing reads",
    )
    PRINT = _frozen("prints: replays print nothing", "print after the replay")
    UNKNOWN = _refused(
        "does what a stream must not do while it captures",
        "cgraph.explain(function, ...) runs it without a capture and names the operator",
    )

    CAPTURE_FAILED = _eager("cannot be captured, for the reason that the message gives")

    # Arguments that no graph takes.
    ARRAY = _eager(
        "has an array, whose contents are not compared",
        "pass a tensor, or exclude it from the guards: guards={name: False}",
    )
    ITERATOR = _eager(
        "has an iterator, which yields different items in each call", "pass a list or a tuple"
    )
    NO_MEMORY = _eager(
        "has a tensor without memory of its own: one of the device meta, or, where it is read in"
        " place, a conjugated or negated one",
        "pass its component tensors, or a dense copy",
    )
    WRAPPED_TENSOR = _eager(
        "has a tensor that is more than its elements, as a sparse, nested or distributed one",
        "pass its component tensors, or a dense copy",
    )
    NO_GPU = _eager(
        "has a tensor on the host, and there is no GPU",
        "to work without a GPU, choose the simulator by name: CGRAPH_DRIVER=sim, or"
        " cgraph.sim.use()",
    )
    OTHER_DEVICE = _eager(
        "has a tensor on another device than the graph",
        "move the tensor to the device before the call",
    )
    SEVERAL_DEVICES = _eager(
        "works on several devices", "graph what runs on each of them by itself"
    )
    EMPTY = _eager("has no elements, so there is no work to save")
    CHANGING_VALUE = _eager(
        "has another plain value in most calls, each of which needs a graph of its own",
        "make it a tensor",
    )
    MOVING_TENSOR = _eager(
        "finds tensors elsewhere in most calls, each of which needs another capture",
        "write to it in place, with copy_(), so that it stays where it is; make a changing number"
        " a tensor",
    )
    OVERLAP = _eager(
        "has arguments that share memory with something that it writes",
        "pass a clone, whose memory nothing else shares",
    )
    WRITTEN_ARGUMENT = _eager(
        "writes an argument in place while gradients are recorded", "return the new value instead"
    )
    CHANGED_ARGUMENT = _eager(
        "changes a container among its arguments, or the memory of a tensor",
        "return the new values instead",
    )
    TOO_LARGE = _eager(
        "has more rows than the largest of sizes=",
        "add a size that is large enough to sizes=; if these are not rows, name the arguments that"
        " have rows: dim={name: 0}",
    )
    PADDING_FAILS = _eager(
        "cannot be padded to a size", "give pad= a number that the dtype of each tensor can hold"
    )
    PADDING_UNCOMPARED = _eager(
        "is padded, and eager and padded calls cannot be compared",
        "declare padding harmless: check_padding=False",
    )
    PADDING_SHOWS = _eager(
        "gives other results if it is padded",
        "let padding rows write nothing that others read, choose a harmless pad=, sizes= without"
        " gaps, or check_padding=False if padding rows do not matter",
    )

    # Results that no replay returns.
    RESULT_ELSEWHERE = _eager(
        "returns a tensor of another device, which replays do not compute",
        "return a tensor on the device, and copy it after the call",
    )
    RESULT_KIND = _eager(
        "returns an object that no replay can make",
        "return strided tensors, and tuples, lists or dictionaries of them",
    )
    RETURNED_TENSOR = _eager(
        "returns a tensor that was there before, while gradients are recorded",
        "return a clone of it, or leave it out",
    )
    NO_GRADIENT = _eager(
        "requires a gradient of a tensor that no replay knows",
        "make it a parameter of a module that the function names, pass it as an argument, or call"
        " under torch.no_grad()",
    )
    NEW_STATE = _eager(
        "leaves a new tensor behind, which later replays would overwrite",
        "write to an existing tensor, with copy_(), or return the new one",
    )
    BREAK_ALIAS = _eager(
        "has a break that returns its argument, which later code writes in place",
        "let the break return a clone, or write to it before it returns",
    )

    # Calls that differ, and states that pass.
    DIFFERS = _eager(
        "computes something else in each call, as Python decides it",
        "pass what decides as a tensor, keep it in a tensor that is written in place, or mark that"
        " work with @cgraph.eager_break",
    )
    HELD_HISTORY = _eager(
        "meets weights whose gradients a result that somebody keeps pins to the default stream",
        "keep it detached, or let it go: then the next call is captured",
    )
    DDP_WARMUP = _eager(
        "runs DistributedDataParallel, which puts its buckets together in its first calls",
        "give warmup=11",
    )
    PROFILER = _eager(
        "runs under a profiler, which hides the code that runs; calls are captured after it"
    )
    CHECKPOINT = _eager(
        "recomputes random numbers in a checkpoint, and replays would draw others",
        "capture it without checkpoints, or without dropout and with preserve_rng_state=False; or"
        " leave it eager",
    )
    CAPTURE_ELSEWHERE = _eager("comes while another thread captures; later calls are replays")
    OPEN_CALLS = _eager("comes before the backward passes of earlier calls; later ones are replays")
    FIRST_RUN = _eager("is a first run; later ones are replays")
    WATCHED = _eager("comes inside of a capture, a dispatch mode or a transform")

    # Compiled functions and their trees.
    MUTATED_INPUT = _eager(
        "writes an input that is neither static nor an output of the same step",
        "make what is written a parameter or buffer of the module, mark it"
        " (torch._dynamo.mark_static_address), or return the new value",
    )
    LONG_STEP = _eager(
        "is on a path as long as it may be, in one step",
        "mark where steps begin: torch.compiler.cudagraph_mark_step_begin()",
    )
    MOVING_WEIGHTS = _eager(
        "finds its static inputs elsewhere in each call",
        "write new weights in place, as parameter.data.copy_(new)",
    )
    MANY_VARIANTS = _eager(
        "has 256 captures in one place, as other outputs were in use in each",
        "hold, or drop, the same outputs in each step",
    )
    MANY_SIZES = _eager("has more sizes than the options allow", "pad inputs to fewer sizes")
    UNCAPTURED_OPERATOR = _eager(
        "has an operator that no capture can have",
        "keep such operators out of the compiled function",
    )
    INPUT_KIND = _eager("has an input that is no tensor", "pass it as a tensor")

    # Calls that are replays, and may surprise.
    MANY_PLACES = _told(
        "reads more places than are compared: replays use their values at the capture",
        "keep large tables in a tensor, or exclude them from the guards: guards={name: False}",
    )
    EMPTY_GRAPH = _told(
        "captures nothing: no work was enqueued on the capturing stream",
        "work on tensors of the graph's device, and leave the current stream as it is",
    )
    SIZES_UNUSED = _told(
        "has no tensor with rows, so sizes= has no effect", "name the dimension of rows with dim="
    )
    LATE_GRADIENT = _told(
        "requires a gradient that its sample did not require, and gets none",
        "set requires_grad before the callable is graphed",
    )
    INNER_HOOKS = _told(
        "has submodules with hooks, whose Python does not run in replays",
        "nothing, if they only work on the device; else move that Python out of the callable",
    )
    TORCHS_POOL = _told(
        "captures into a pool of torch's own, which cannot be paused",
        "nothing, if pools are never paused; else remove the cause that the message names",
    )
    SHORT_HISTORY = _told(
        "allocates more than torch's record of its allocator holds: its memory is not known",
        "raise max_entries of torch.cuda.memory._record_memory_history",
    )
    NO_SPLITTING_OPERATOR = _told(
        "does not call an operator of splitting_ops", "give the name of one that the graph calls"
    )
    COMPILE_CACHE = _told(
        "cannot use files with compiled pieces, which are compiled anew",
        "remove the file, or let CGRAPH_CACHE_DIR be a folder that only this user can write",
    )
    SAVED_GRAPHS = _told(
        "cannot keep its graphs in a file, so that the next start captures them again",
        "call cgraph.record_images(unless=path) before the first CUDA work, and read"
        " docs/guides/saved.md",
    )
    LOOP_STEP = _told(
        "cannot be the body of a loop, so that the host makes each step",
        "let the step do all its work on the device, and change its tensors in place",
    )
    MANY_SHAPES = _told(
        "has a tensor of another shape in each call, each of which needs a graph of its own",
        "give sizes= so that calls share graphs, or write into a tensor of one size, with"
        " cache.index_copy_(dim, position, new) and a position of shape [1]",
    )
    HELD_RESULT = _told(
        "overwrites a result of the last call but one, which is still held",
        'clone what is kept, or take outputs="fresh"',
    )

    def __reduce_ex__(self, _: object) -> tuple[object, ...]:
        """Pickle by name: texts change."""
        return getattr, (Cause, self.name)

    @property
    def code(self) -> str:
        """The code, as ``"CG-HOST-READ"``."""
        return f"CG-{self.name.replace('_', '-')}"

    @property
    def kind(self) -> str:
        """The name in words, as ``"host read"``."""
        return self.name.replace("_", " ").lower()

    @property
    def severity(self) -> Severity:
        """The consequence."""
        return self.value.severity

    @property
    def what(self) -> str:
        """The deed of such a line, or such a call, to be read after "it"."""
        return self.value.what

    @property
    def fix(self) -> str:
        """The remedy; empty if it passes by itself, or if the message alone knows it."""
        return self.value.fix

    @property
    def page(self) -> str:
        """The text about it as Markdown, with an example and what to write instead."""
        # It takes long to import, and few programs read a page.
        from importlib.resources import files

        more = (files("cgraph") / "codes" / f"{self.code}.md").read_text(encoding="utf-8")
        fix = f"**Fix:** {self.fix}.\n\n" if self.fix else ""
        return f"# {self.code}\n\nIt {self.what}.\n\n{fix}{more}"

    @classmethod
    def of_code(cls, code: str) -> Cause:
        """Return the cause of a code.

        Raises:
            ValueError: There is no such code.
        """
        found = next((one for one in cls if one.code == code.upper()), None)
        if found is None:
            raise ValueError(f"code is {code!r}, expected one as CG-HOST-READ")
        return found
