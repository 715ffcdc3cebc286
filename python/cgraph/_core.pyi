"""The native half of cgraph: cg-core for Python. Not a public interface."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Literal, final

from torch import Tensor
from typing_extensions import Self, disjoint_base

from cgraph._driver import Captured

__all__ = [
    "Block",
    "Capture",
    "CaptureMark",
    "Checkpoint",
    "Device",
    "Dispatcher",
    "Entry",
    "Event",
    "Fresh",
    "FunctionLock",
    "Graph",
    "Guards",
    "HookHandle",
    "Inputs",
    "Ladder",
    "LastStream",
    "LentResults",
    "NewNode",
    "NodeAddress",
    "OperatorNotes",
    "OperatorReader",
    "Outputs",
    "PaddedGraph",
    "Pool",
    "Rung",
    "SamePlaces",
    "SavedGraphs",
    "SavedKernels",
    "Segments",
    "Signature",
    "Sim",
    "StepSource",
    "Stream",
    "Template",
    "TensorReader",
    "TorchSettings",
    "Tracker",
    "Tree",
    "TreeFunction",
    "TreeNode",
    "begin_and_hand_over",
    "begin_exit",
    "begin_forked",
    "call_in_a_row",
    "end_broken",
    "enter_busy",
    "exchange_memory",
    "is_any_busy",
    "is_forked",
    "leave_busy",
    "lent_memory",
    "record_images",
    "register_for_all",
    "require_unforked",
    "set_driver",
    "settle_pools",
    "take_refusal",
    "version",
    "watches_dictionaries",
]

def begin_exit() -> None:
    """Tell cgraph that the interpreter exits: no object calls the driver any more."""

def begin_forked() -> None:
    """Tell cgraph that the process was just forked."""

def is_forked() -> bool:
    """Return whether the process is a fork of one that had used a driver."""

def require_unforked() -> None:
    """Raise in a fork of a process that had used a driver."""

def lent_memory(
    address: int,
    elements: tuple[tuple[int, int], Sequence[int], Sequence[int]],
    ordinal: int | None,
    owner: object,
    pool: Pool | None = None,
) -> object:
    """Return a DLPack capsule of a tensor, which keeps an owner until its last tensor is gone.

    ``elements`` are DLPack's code and the bits of one, sizes and strides. The memory is of
    ``cuda:ordinal``, or of the host without a number. That of a simulated pool is kept as well.
    """

def settle_pools() -> None:
    """Give back what torch has released and what could not go back at once."""

def take_refusal(bytes: int) -> BaseException | None:
    """Return the exception for the last segment of so many bytes that this thread was refused."""

def version() -> str:
    """Return the version of the native half."""

def watches_dictionaries() -> bool:
    """Return whether Python reports changes of dictionaries, so that guards need not look."""

def begin_and_hand_over(stream: Stream) -> None:
    """Begin a relaxed capture that others end. It has one node, which does nothing."""

def register_for_all(phase: str, hook: Callable[..., object]) -> HookHandle:
    """Add a callable to the hooks of all graphs.

    ``phase`` is ``"capture_start"``, ``"capture_end"``, ``"instantiate"``, ``"replay_start"``,
    ``"replay_end"`` or ``"destroy"``.
    """

def enter_busy() -> None:
    """Count a thread that begins to run a function for a capture; see :func:`is_any_busy`."""

def is_any_busy() -> bool:
    """Return whether any thread runs a function for a capture."""

def leave_busy() -> None:
    """Count a thread that has finished running a function for a capture."""

def set_driver(number: int, sim: Sim | None = None) -> None:
    """Set the driver in force, by a number that no other driver has; initially it is 0.

    ``sim`` is its simulator, if it is one; at 0 the default simulator is in force.
    """

def end_broken(stream: Stream) -> None:
    """End a capture that others began, if the stream captures, and drop its work."""

@final
class Device:
    """One GPU, real or simulated."""

    @staticmethod
    def cuda(ordinal: int) -> Device:
        """Return the GPU with this number; raises ``NoDriverError`` without a usable driver."""
    @staticmethod
    def sim(sim: Sim) -> Device:
        """Return a simulated device."""
    @property
    def name(self) -> str:
        """The driver and device, as in ``cuda:0``."""
    @property
    def driver_version(self) -> int:
        """The driver's version as CUDA numbers it: 12040 is 12.4."""
    def memory_range(self, address: int) -> tuple[int, int] | None:
        """Return start and size of the allocation at an address; None if nothing is there."""
    def word(self, address: int) -> int | None:
        """Return the eight bytes at an address as a number; None if nothing is there."""
    def has_captures(self) -> bool:
        """Return whether a capture is open that cgraph knows of."""
    def mark_capture(self) -> CaptureMark:
        """Note that others have begun a capture, until the result is dropped."""
    def collect(self) -> int:
        """Drop what only finished work still used; return the number of things that wait."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Stream:
    """A queue of work on a device."""

    def __new__(cls, device: Device, *, handle: int | None = None) -> Self:
        """Create a stream, or with ``handle`` adopt one, which must outlive the result."""
    @property
    def handle(self) -> int:
        """The raw stream; zero is the legacy default stream."""
    @property
    def device(self) -> Device:
        """The device of the stream."""
    def synchronize(self) -> None:
        """Wait until all work has finished."""
    def query(self) -> bool:
        """Return whether all work has finished."""
    def is_capturing(self) -> bool:
        """Return whether the stream captures."""
    def captured_nodes(self) -> int | None:
        """Return the number of nodes of the open capture; None without one, or if it is broken."""
    def wait_stream(self, stream: Stream) -> None:
        """Make later work wait for all work enqueued on another stream so far."""
    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
    def record_event(self, event: Event) -> None:
        """Record the event after all work enqueued so far."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Event:
    """A point in a stream's work that other work can wait for."""

    def __new__(cls, device: Device) -> Self: ...
    def query(self) -> bool:
        """Return whether the work before the last record has finished."""
    def synchronize(self) -> None:
        """Wait until the work before the last record has finished."""

@final
class Capture:
    """An open capture on a stream."""

    @staticmethod
    def begin(stream: Stream, mode: str) -> Capture:
        """Begin a capture; ``mode`` is ``"global"``, ``"thread_local"`` or ``"relaxed"``."""
    @staticmethod
    def take_over(stream: Stream) -> Capture:
        """Take over a capture that others began."""
    def finish(self) -> Template:
        """End the capture and make the template."""

@final
class Tracker:
    """A follower of an open capture: it finds the new nodes."""

    def __new__(cls, stream: Stream) -> Self:
        """Follow the capture that is open on the stream."""
    def new_nodes(self, current: Stream) -> list[int]:
        """Return the raw nodes that no earlier call has returned.

        None if ``current`` is not a stream of the capture, or if the capture was made unusable.
        """

@final
class NodeAddress:
    """An address that a node names, and the allocation that it lies in."""

    node: int
    """The raw node."""
    name: str | None
    """The name of its kernel; ``memcpy`` or ``memset`` for such a node."""
    address: int
    base: int
    """Start of the allocation."""
    bytes: int
    """Bytes of the allocation."""

@final
class Template:
    """A graph that can change and cannot run."""

    @staticmethod
    def from_raw(device: Device, handle: int, owner: object) -> Template:
        """Return a template for a graph of someone else, who is kept as long as the result."""
    @staticmethod
    def looped(
        step: Sequence[tuple[Template, tuple[int, int, int] | None, Sequence[tuple[int, int]]]],
        steps: tuple[int, int],
        until: tuple[int, int, int] | None,
        pieces: Sequence[tuple[int, int]],
        host: tuple[int, int, object],
    ) -> Template:
        """Return a graph that makes a step again and again; see ``cgraph._loops``.

        ``step`` are its stages: a graph, the flags without which it does not run, and the addresses
        of the offsets that it moves, and how far. Flags are the address of the first, how many
        there are, and the bytes of each. ``steps`` are the most that a replay makes, and those of
        an iteration. ``until`` are flags that end it; ``pieces`` are published, as addresses and
        bytes; ``host`` are the addresses of the words and of the ring, and what has both.
        """
    @property
    def handle(self) -> int:
        """The raw graph."""
    @property
    def graph_id(self) -> int | None:
        """The number by which tools know the graph; None from a driver older than CUDA 13.1."""
    def node_count(self) -> int:
        """Return the number of nodes, without those of child graphs."""
    def count(self) -> int:
        """Return the number of nodes, including those of child graphs."""
    def addresses(self) -> list[NodeAddress]:
        """Return the addresses that its nodes name."""
    def json(self) -> str:
        """Return nodes and edges as JSON text."""
    def dot(self, verbose: bool) -> str:
        """Return nodes and edges as a Graphviz graph."""
    def add_child(self, child: Template) -> None:
        """Add a node that runs a copy of another template and depends on no other node."""
    def copy(self) -> Template:
        """Return a copy with its own nodes."""
    def copy_mapped(self) -> tuple[Template, dict[int, int]]:
        """Return a copy, and its raw nodes by the nodes that they are copies of."""
    def clear(self) -> None:
        """Remove all nodes."""
    def retain(self, object: object) -> None:
        """Keep an object alive as long as the template, its execs and their replays in flight."""
    def require_named(self, pools: Sequence[Pool]) -> None:
        """Refuse replays while one of these pools is paused, if a node names memory of that."""
    def require_pool(self, pool: Pool) -> None:
        """Refuse replays while a pool is paused. Its segments may go."""
    def add_conditional(self, simulator: Sim, bodies: list[Template]) -> None:
        """Add a simulator's conditional node that chooses from copies of the bodies.

        Replays panic.
        """
    def retain_pool(self, pool: Pool) -> None:
        """Keep a pool's segments alive as long as the template and its execs."""

@final
class SavedGraphs:
    """Graphs as data, with the images of their kernels. Memory is a name, an address and bytes."""

    def __new__(cls, device: Device) -> Self: ...
    @staticmethod
    def open(path: str | PathLike[str]) -> SavedGraphs:
        """Read a file."""
    def add(
        self,
        name: str,
        template: Template,
        memory: Sequence[tuple[str, int, int]],
        again: tuple[Template, Sequence[tuple[str, int, int]]] | None = None,
    ) -> tuple[int, int]:
        """Add a graph, which was maybe captured again with other memory.

        Return how many of its addresses that proves, and how many are assumed.
        """
    def add_contents(self, device: Device, place: tuple[str, int], block: tuple[int, int]) -> None:
        """Add what lies in a block: a part, from an offset on, of memory that has a name."""
    notes: str
    """A text that is kept with the graphs."""
    def write(self, path: str | PathLike[str]) -> None:
        """Write a file, which only its owner may read."""
    def load(self, device: Device) -> SavedKernels:
        """Load the kernels."""

@final
class SavedKernels:
    """The graphs of a file, with their kernels loaded."""

    def template(
        self, name: str, memory: Sequence[tuple[str, int, int]], owner: object
    ) -> Template:
        """Build a graph that works on memory of the saved names, and keeps the owner."""
    def restore(self, memory: Sequence[tuple[str, int, int]]) -> None:
        """Write the contents that were saved to memory of the same names."""

def record_images(cupti: str | PathLike[str]) -> None:
    """Keep from now on what kernels are loaded from; ``cupti`` is the file of CUPTI."""

@disjoint_base
class Graph:
    """The state machine behind :class:`cgraph.CUDAGraph`."""

    def __new__(cls, keep_graph: bool = False, *_args: Any, **_kwargs: Any) -> Self: ...
    def replay(self) -> None:
        """Enqueue one run of the graph on the current stream and return."""
    def _replay_with(self, tensors: tuple[Any, ...]) -> None: ...
    def _replay_into(
        self, tensors: tuple[Any, ...] | None, to: Sequence[tuple[int, int]]
    ) -> None: ...
    def _replay_made(self, fresh: Fresh, tensors: tuple[Any, ...]) -> list[Any]: ...
    _keep_graph: bool
    def _adopt(self, captured: Captured) -> None: ...
    def _register(self, phase: str, hook: Callable[..., object]) -> HookHandle: ...
    def _run_hooks(self, phase: str) -> None: ...
    def _has_hooks(self, phase: str) -> bool: ...
    def _register_destroy(
        self, callback: Callable[[], object], synchronize: bool
    ) -> HookHandle: ...
    def _retain(self, object: object, synchronize: bool) -> HookHandle: ...
    def _end_cycle(self) -> None: ...
    def _instantiate(self, measures: bool) -> None: ...
    def _drop_template(self, empties: bool) -> None: ...
    def _clear(self) -> None: ...
    @property
    def _has_template(self) -> bool: ...
    @property
    def _has_exec(self) -> bool: ...
    @property
    def _template(self) -> Template: ...
    @property
    def _exec_bytes(self) -> int | None: ...
    @property
    def _exec_handle(self) -> int | None: ...
    @property
    def _exec_id(self) -> int | None: ...

@final
class HookHandle:
    """A registration, undone by ``remove()`` or at the end of a ``with`` block."""

    @property
    def id(self) -> int:
        """A number that no other registration has."""
    def remove(self) -> None:
        """Undo the registration; does nothing if it is gone."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class TensorReader:
    """A reader of address, layout and device of tensors."""

    def __new__(
        cls,
        tensor_type: type,
        exchange_api: object | None,
        functions: dict[str, int] | None = None,
        samples: Sequence[object] = ...,
        fields: dict[str, int] = ...,
    ) -> Self:
        """Create a reader.

        ``exchange_api`` is the type's ``__dlpack_c_exchange_api__``, if it has one.

        torch's stable C functions, whose addresses ``functions`` has, are faster; they read tensors
        of exactly the classes of the samples. Where some are missing, or the samples' objects are
        built in another way than in the known torch versions, the exchange API reads all. It also
        does so after a tensor that they could not read. Objects that have the ``fields`` are
        compared without them.
        """
    @staticmethod
    def places() -> dict[str, int]:
        """Return where it reads fields of tensors and of their storages, in bytes."""
    @property
    def uses_stable_functions(self) -> bool:
        """True if torch's stable functions read the tensors that they can."""
    @property
    def uses_fields(self) -> bool:
        """True if tensors are read by their fields where possible."""
    def requires_grad(self, tensor: object) -> bool:
        """Return whether a tensor requires a gradient.

        Uses an unstable function of torch, if it is known and was right for the samples.
        """

@final
class OperatorReader:
    """Takes the arguments and results of operators apart."""

    def __new__(
        cls,
        tensors: TensorReader,
        plain: Sequence[type],
        generator: type,
        script_object: type,
        memory_of: Callable[[Any], object | None],
        device_type: str,
    ) -> Self:
        """Create a reader.

        ``plain`` are torch's own classes of tensors. ``memory_of`` returns the storage of a tensor
        that ``tensors`` cannot read. Captures work on devices of ``device_type``.
        """
    def split(
        self, args: Iterable[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Split arguments, in order: those that are not device tensors, and tensors."""
    @property
    def devices(self) -> list[Any]:
        """The devices of the tensors so far."""

@final
class OperatorNotes:
    """Notes where the tensors of a call's operators come from."""

    def __new__(
        cls,
        reader: OperatorReader,
        inputs: dict[int, tuple[str, int]],
        origins: dict[int, tuple[Any, ...]],
        made: dict[int, Any],
        weak_storage: Callable[[Any], object],
        begins: Sequence[int | None],
    ) -> Self:
        """Create notes.

        Args:
            reader: Takes arguments apart.
            inputs: The origins of the tensors that the call got, by their ``id``.
            origins: The origins of memory, by the number of the storage. Operators add to it.
            made: Gets a weak reference to each storage that an operator made, by its number.
            weak_storage: Makes these references.
            begins: Where each input begins in its storage, in elements; None if its copy may have
                other strides.
        """
    @property
    def has_nested(self) -> bool:
        """True if an operator got a nested tensor."""
    def take(
        self, args: Iterable[Any], kwargs: dict[str, Any], outside: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], list[int], list[tuple[int, tuple[str, int], Any]]]:
        """Take an operator's arguments apart.

        Args:
            args: Positional arguments.
            kwargs: Arguments by name.
            outside: The number of known storages from outside.

        Returns:
            The arguments that are not device tensors; the origin of each tensor, and its layout
            there; the numbers of their storages; and, for the caller to note, memory from outside
            that was not known: the number of the storage, its origin, and a tensor there.
        """
    def make(self, result: Any, given: Sequence[int], place: int) -> None:
        """Note the storages that an operator made: those of its results that it did not get."""

@final
class SamePlaces:
    """Tensors among the arguments of a call that must be, and lie, where they were."""

    def __new__(cls, reader: TensorReader, args: tuple[Any, ...], places: Sequence[int]) -> Self:
        """Take the tensors at these places."""
    def moved(self, args: tuple[Any, ...]) -> int | None:
        """Return the first place with another tensor, or one that lies elsewhere."""

@final
class Signature:
    """The properties of tensors that fit a static tensor."""

    def __new__(cls, reader: TensorReader, tensor: object) -> Self: ...
    def check(self, tensor: object, index: int = 0) -> tuple[Literal["same", "copy", "torch"], int]:
        """Return how a tensor gets into the static one.

        It is already there (``"same"``), a copy of the bytes at the address brings it there
        (``"copy"``),
        or torch must copy it (``"torch"``). Raises ``ArgumentError`` naming the argument ``index``
        if shape, dtype or device differ.
        """
    @property
    def address(self) -> int:
        """The address at which the static tensor begins."""
    @property
    def nbytes(self) -> int:
        """The total bytes of its elements."""
    @property
    def is_dense(self) -> bool:
        """True if the elements lie side by side, so that bytes can be copied."""

@final
class Inputs:
    """Root nodes of a template that copy tensors into static ones."""

    def __new__(
        cls,
        template: Template,
        reader: TensorReader,
        tensors: Sequence[object],
        stores: Sequence[int] = ...,
    ) -> Self: ...
    def __len__(self) -> int: ...
    def sources(self, tensors: tuple[object, ...]) -> list[int]:
        """Return the address from which a replay copies to each static tensor.

        It is the tensor's own address where nothing is to be copied or torch has just copied.
        """

@final
class Outputs:
    """Last nodes of a template that copy its memory to where each replay says."""

    def __new__(cls, template: Template, storages: Sequence[tuple[int, int]]) -> Self: ...
    def __len__(self) -> int: ...

@final
class Fresh:
    """A maker of new tensors that are like the results of a graph."""

    def __new__(
        cls,
        storages: Sequence[tuple[int, int]],
        results: Sequence[tuple[int, Any]],
        reader: TensorReader,
        empty_strided: Callable[..., Any],
        functions: dict[str, int],
    ) -> Self:
        """Take the memory that replays copy, and for each result its place there and a tensor."""
    @property
    def is_native(self) -> bool:
        """True if torch's C functions make the tensors."""
    def make(self) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return new tensors, and address and bytes of the destination of each piece of memory."""

@final
class PaddedGraph:
    """Replays of a graph whose tensors have fewer rows than its static inputs."""

    def __new__(
        cls,
        graph: Graph,
        inputs: Inputs,
        rows: int,
        of: int,
        fill: str,
        has_rows: Sequence[bool],
        otherwise: Callable[..., object],
    ) -> Self: ...

@disjoint_base
class Segments:
    """Graphs with eager work between them; behind :class:`cgraph.SegmentedGraph`."""

    def __new__(
        cls,
        steps: Sequence[Graph | Callable[[], object] | tuple[Any, ...]],
        modes: tuple[Callable[[], bool], Callable[[], bool], Callable[[], bool]],
    ) -> Self:
        """Take the steps in order: graphs, callables, and calls that need nothing around them.

        Such a call is ``(callable, function, args, kwargs, (grad, inference), take, is_none)``: the
        callable stands for it under other torch modes, which the functions ``modes`` report. Raises
        ``ArgumentError`` for a step that is none of these.
        """
    def replay(self) -> None:
        """Replay the graphs on the current stream and call the callables, each in its turn.

        An exception of a step stops the run; the next replay begins with the first step. Raises
        ``StateError`` if there is no step.
        """
    def _replay_with(self, tensors: tuple[Any, ...]) -> None:
        """Replay after copying each tensor into its static input of the first graph."""
    def _replay_into(self, tensors: tuple[Any, ...] | None, to: Sequence[tuple[int, int]]) -> None:
        """Replay, with ``tensors`` if given, and let the last graph copy its outputs to ``to``."""
    def _replay_made(self, fresh: Fresh, tensors: tuple[Any, ...]) -> list[Any]:
        """As ``_replay_into``, to new tensors, which are returned."""
    @property
    def _is_running(self) -> bool:
        """True if a replay is under way, as seen from a step or another thread."""
    def _clear(self) -> None: ...

@disjoint_base
class Ladder:
    """Graphs by key; behind :class:`cgraph.GraphLadder`."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Take no graphs; subclasses may take arguments."""
    def __call__(self, key: Any, /, *args: Any) -> Any:
        """Let the rung of a key in ``_rungs`` serve the call; ``_rung`` finds others, or raises.

        A call that it does not serve natively calls it with a tuple of the arguments.
        """
    @property
    def _rungs(self) -> dict[Any, Any]:
        """All graphs by key, each a :class:`Rung`."""

@disjoint_base
class Rung:
    """The graph of one key."""

    def __new__(
        cls,
        replayed: Graph | Segments,
        returned: tuple[list[Any], object, Callable[[], object] | None],
        takes: int | None,
    ) -> Self:
        """Take what calls replay and what they return, as for :class:`Entry`.

        ``takes`` is the number of tensors that a call may give instead of the static inputs; None
        if Python has to look at them first.
        """
    def serve(self, tensors: tuple[Any, ...]) -> Any:
        """Replay with these tensors, or with what lies in the static inputs; return the result."""

@final
class CaptureMark:
    """A capture that others have begun."""

@final
class Pool:
    """Segments that a set of captures allocates from."""

    def __new__(
        cls,
        device: Device,
        *,
        sim: Sim | None = None,
        limit: int | None = None,
        base: int | None = None,
        range_bytes: int | None = None,
    ) -> Self: ...
    @property
    def id(self) -> int:
        """A number that no other pool has."""
    @property
    def device(self) -> Device:
        """The device of the pool."""
    @property
    def limit(self) -> int | None:
        """The most bytes that its segments may have."""
    @property
    def reserved(self) -> int:
        """The total bytes of its segments."""
    @property
    def is_paused(self) -> bool:
        """True if its memory is given back."""
    def functions(self) -> tuple[int, int, int]:
        """Return a number for the functions that torch's allocator calls, and their addresses."""
    def allocate(self, stream: Stream, bytes: int) -> Block:
        """Return a block for work on a stream; given back when the last reference to it goes."""
    def checkpoint(self) -> Checkpoint:
        """Return which blocks of the simulator are in use."""
    def restore(self, checkpoint: Checkpoint) -> list[Block]:
        """Take blocks of a checkpoint again that were given back since; return these.

        Raises ``ArgumentError`` if one that was allocated since then is in use.
        """
    def segments(self) -> list[Block]:
        """Return the segments of the simulator, whole."""
    def stats(self) -> list[tuple[str, int]]:
        """Return bytes by name; see ``cgraph.MemPool.stats``."""
    def segment_stats(self) -> list[tuple[int, int, int]]:
        """Return address, bytes and bytes in use of each segment."""
    def covers(self, address: int) -> bool:
        """Return whether an address lies in one of its segments."""
    def ranges(self) -> list[tuple[int, int]]:
        """Return start and bytes of each range of addresses."""
    def trim(self) -> int:
        """Give wholly free segments back; return the number of bytes."""
    def pause(self, keep: str) -> None:
        """Give all memory back; ``keep`` is `discard` or `host` and decides about the contents."""
    def resume(self) -> None:
        """Map memory at the same addresses again."""

@final
class Block:
    """A range of simulated device memory, with the host memory behind it."""

    @property
    def address(self) -> int:
        """The address of its start on the device."""
    @property
    def host_address(self) -> int:
        """The address of its start in host memory."""
    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
    def poison(self) -> None:
        """Overwrite it with the simulator's poison."""

@final
class Checkpoint:
    """The blocks of a pool that were in use at one moment."""

@final
class Sim:
    """A simulated device and its driver."""

    current_stream: Stream | None
    """The current stream of this thread; None for the default one."""
    is_default: bool
    """True if it is in force where no driver was put in force."""

    def __new__(
        cls,
        *,
        seed: int = 0,
        memory: int = ...,
        driver_version: int = 13000,
        asynchronous: bool = False,
    ) -> Self:
        """Make a device; see :class:`cgraph.sim.Simulator`."""
    def launch(self, stream: Stream, name: str, kernel: Callable[[], object]) -> None:
        """Enqueue a callable as a kernel, or record it where the stream captures."""
    def raise_failure(self) -> None:
        """Raise what the last failed kernel raised, and make the device usable again."""
    def step(self) -> bool:
        """Run one ready operation; False if there is none."""
    def drive(self) -> None:
        """Run until nothing is in flight."""
    def delay(self, stream: Stream, delayed: bool) -> None:
        """Hold a stream's work back until nothing else can run."""
    def fail_next(self, call: str, code: int) -> None:
        """Make the next call of this CUDA name fail with this code."""
    def fail_call(self, n: int, code: int) -> None:
        """Make the n-th fallible call from now fail with this code; zero is the next one."""
    def clear_faults(self) -> None:
        """Take back faults that have not happened."""
    def live(self) -> dict[str, int]:
        """Return the number of existing objects of each kind."""
    def calls(self) -> list[str]:
        """Return CUDA's names of the calls made so far."""

@final
class StepSource:
    """The step that a call belongs to, by attributes of objects that count.

    Once a mark counts, other counts do not.
    """

    def __new__(cls) -> Self: ...
    def follow(self, object: object, name: str, is_mark: bool) -> None:
        """Let an attribute count: of marks, or of steps that are counted without marks."""
    def forget_marks(self) -> None:
        """Let steps count by themselves again, until the next mark."""

@disjoint_base
class Tree:
    """The graphs of one pool, and the path that calls have taken.

    A derived class has ``_record``, which makes nodes, ``_end``, which takes outputs away, and
    ``_eager``, which is told of other calls.
    """

    def __new__(
        cls,
        reader: TensorReader,
        steps: StepSource,
        last_stream: LastStream,
        set_error: Callable[..., Any],
        exchanges: bool,
        is_capturing: Callable[[], bool],
        is_intercepted: Callable[[], bool],
        forward_ad: dict[str, Any],
        functions: dict[str, int],
        keys: list[int],
    ) -> Self: ...
    def __enter__(self) -> None:
        """Take the lock that one thread at a time holds to call a function."""
    def __exit__(self, *error: object) -> None: ...
    def add(
        self,
        mode: str,
        statics: Sequence[int],
        mutated: Sequence[int],
        limit: int | None = None,
        pair: int | None = None,
        part: int = 0,
    ) -> int:
        """Add a function for ``"inference"``, ``"forward"`` or ``"backward"``; return its number.

        Raises ``ArgumentError`` for another mode.
        """
    @property
    def is_busy(self) -> bool:
        """True if a call is under way, as seen from inside of it."""
    def set_running_backward(self, pair: int | None = None) -> None:
        """Note that a backward pass runs without the tree."""
    @property
    def has_pending_backward(self) -> bool:
        """True if a forward pass waits for its backward pass."""
    @property
    def held_outputs(self) -> int:
        """The number of outputs of the path that somebody holds."""
    def end_path(self) -> tuple[list[tuple[Any, int, int]], bool] | None:
        """End the path; return its outputs that are held, and whether they own their blocks.

        A path that has ended comes again until :meth:`forget_ended`.
        """
    def forget_ended(self) -> None:
        """Note that the outputs of the path that has ended are taken away."""
    def clear(self) -> None:
        """Drop all nodes. The path has been ended."""
    @property
    def nodes(self) -> list[tuple[int, int | None, int, Any]]:
        """The nodes: number, that of the parent, that of the function, and the node."""
    @property
    def path(self) -> list[int]:
        """The numbers of the nodes of the path, the root first."""

@disjoint_base
class TreeFunction:
    """A function of a tree; it takes a list, which it empties, and returns a list."""

    def __new__(
        cls,
        tree: Tree,
        id: int,
        model: Callable[[list[Any]], Any],
        inputs: int,
        message: str,
        elsewhere: Sequence[int],
    ) -> Self: ...
    def __call__(self, inputs: list[Any]) -> Any:
        """Replay the node that the call fits, or let the tree record one.

        Raises ``ArgumentError`` for another number of inputs.
        """
    @property
    def id(self) -> int:
        """Its number in the tree."""

@disjoint_base
class TreeNode:
    """A recorded call: what a replay takes and returns, and who holds its outputs."""

    def __new__(
        cls,
        graph: Graph,
        copied: Sequence[int],
        spans: Sequence[tuple[int, int]],
        stand_ins: Sequence[tuple[int, Callable[[], Any]]],
        outputs: list[tuple[str, Any]],
        with_gradients: Sequence[int],
        places: Sequence[int],
        keeps_held: bool,
        reader: TensorReader,
        count_uses: Callable[[int], int] | None,
        fresh: Fresh | None,
        may_be_fresh: bool,
    ) -> Self: ...
    def hold(
        self,
        prototypes: tuple[Any, ...],
        storages: Sequence[tuple[int, int]],
        ends: Sequence[Callable[[], object]] = ...,
    ) -> None:
        """Take the prototypes, and of each piece its storage and the references to it.

        At the same time, ``ends`` are called.
        """
    def note_kept(self, bytes: int) -> None:
        """Count bytes of outputs that were copied as somebody held them."""
    @property
    def kept_bytes(self) -> int:
        """The bytes of its outputs that were copied as somebody held them."""
    def is_held(self, index: int) -> bool:
        """Return whether somebody holds a piece of its memory."""
    @property
    def prototypes(self) -> tuple[Tensor, ...]:
        """The tensors that callers get aliases of."""
    @property
    def places(self) -> list[int]:
        """The number of the piece of memory of each prototype."""
    @property
    def replays(self) -> int:
        """How often it was replayed for a call."""
    @property
    def keeps_held(self) -> bool:
        """True if outputs that are held when the path ends get memory of their own."""

@final
class NewNode:
    """A call that becomes a node, while Python records it."""

    @property
    def managed(self) -> list[int]:
        """The places of the inputs that lie in outputs of the path."""
    @property
    def statics(self) -> list[int]:
        """The places of the inputs that stay where they are."""
    @property
    def is_fresh(self) -> bool:
        """True if replays are to be able to copy results to new memory."""
    @property
    def path(self) -> list[Any]:
        """The nodes of the path, the root first."""
    @property
    def live(self) -> list[tuple[Any, int, int]]:
        """Outputs of the path that somebody holds: node, number of the piece, and address."""
    @property
    def dead(self) -> list[tuple[Any, int, int]]:
        """Outputs that may have been held after the last node of the path, and are not now."""
    @property
    def owns(self) -> bool:
        """True if the outputs of the path own their blocks."""
    @property
    def ended(self) -> tuple[list[tuple[Any, int, int]], bool] | None:
        """The path that the call has ended, as of :meth:`Tree.end_path`."""
    @property
    def moved(self) -> list[tuple[int, int, int]]:
        """The static inputs that were elsewhere in the last graph: place, address then and now."""
    def own_path(self) -> None:
        """Note that the outputs of the path own their blocks from here on."""
    def copy(self, places: Sequence[int], gone: Sequence[int]) -> list[int]:
        """Take static inputs for such that may be anywhere: these, and those that always move.

        Args:
            places: The places.
            gone: The places of those whose memory of the recording before is gone.

        Returns:
            The places of those that always move.
        """
    def close(self, node: TreeNode, addresses: Sequence[int]) -> None:
        """Add the node, as the end of the path, with the addresses of its memory."""

def call_in_a_row(functions: Sequence[Callable[[], object]]) -> None:
    """Call native functions in a row, until one raises: an interrupt finds all called or none."""

def exchange_memory(one: int, other: int) -> None:
    """Let two living storages exchange their memory; by the addresses of torch's objects."""

@disjoint_base
class Dispatcher:
    """The entries of a function. A call that fits one is a replay; any other goes to `_miss`."""

    def __new__(
        cls,
        is_capturing: Callable[[], bool],
        is_intercepted: Callable[[], bool],
        forward_ad: dict[str, Any],
        is_grad_enabled: Callable[[], bool],
        is_inference: Callable[[], bool],
        is_autocast: Callable[[], bool],
        autocast: Callable[[], object],
        functions: dict[str, int],
        keys: list[int],
        settings: TorchSettings,
    ) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the entry that the arguments fit."""
    def entry_for(self, *args: Any) -> Entry | None:
        """Return the entry that a call would replay, and note its use; None if it fits none."""
    @property
    def _is_intercepted(self) -> bool:
        """True if a transform of ``torch.func``, a mode or a tracer sees operators."""
    def add(self, entry: Entry) -> None:
        """Add an entry, as the most recently used one."""
    def remove(self, entry: Entry) -> bool:
        """Remove an entry; return whether it was there."""
    @property
    def entries_by_use(self) -> list[Entry]:
        """The entries, most recently used first."""

@final
class TorchSettings:
    """torch's settings of all threads, for determinism, precision and libraries."""

    def __new__(
        cls,
        context: int,
        flags: Sequence[int],
        precision: int,
        dtype: int,
        also: Callable[[], int] | None,
    ) -> Self:
        """Read them by torch's functions at these addresses, 0 for none, and by ``also``."""
    def now(self) -> int:
        """Return a number that is another one for other settings."""

@final
class Entry:
    """A graph with the arguments that it takes and what it returns."""

    def __new__(
        cls,
        args: list[Any],
        kwargs: list[Any],
        *,
        is_in_order: bool,
        modes: tuple[bool, bool, object],
        work: object,
        outputs: tuple[list[Any], object, Callable[[], object] | None] | None,
        last_stream: LastStream,
        lock: FunctionLock | None,
        lent: LentResults | None = None,
        guards: Guards | None = None,
        written: Sequence[tuple[int, int]] = ...,
        is_open: Callable[[], bool] | None = None,
        placed: Sequence[Signature] = ...,
        assigns: Callable[..., Any] | None = None,
        settings: int | None = None,
    ) -> Self:
        """Create an entry.

        ``outputs`` is ``(leaves, build, warn)``; without it, ``work`` returns the result.

        A leaf is ``("static", tensor, signature)``, ``("copied", tensor)``, ``("fresh", number,
        fresh)``, ``("argument", place)``, ``("view", place, make)`` or ``("constant", value)``:
        ``make`` takes the tensor that the caller gave at that place, and returns a view of it.
        ``build`` is ``"single"``, ``"tuple"`` or takes a list of leaves. ``warn`` is called once,
        before the replay that overwrites a live static result of the last call but one.

        ``placed`` are the signatures of tensors at guarded places, which are copied behind those of
        the arguments. ``assigns`` takes what a replay returns, the objects among the arguments and
        these, and returns the result. ``settings`` are those that torch must have; None for any.
        """
    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Any],
        objects: Sequence[Any] = ...,
    ) -> Any:
        """Serve a call whose tensors and objects were found, whatever the layout of tensors."""
    @property
    def replays(self) -> int:
        """The number of calls that it has served."""
    @property
    def eager_calls(self) -> int:
        """The number of calls that it has answered without a replay."""
    @property
    def last_use(self) -> int:
        """The time of its creation or last replay: the later, the larger."""

@final
class Guards:
    """The expected contents of places outside a function's arguments, and in objects among them.

    A place is ``(parent, step, check)``. Parents come first; that of a root is -1. A step is
    ``("root", object)``, ``("object", k)`` for one that the caller of ``fits`` gives, ``("attr",
    name)`` of the object's own dictionary, ``("class", name)`` of its class without descriptors,
    ``("slot", member_descriptor)``, ``("item", key)``, ``("cell",)``, ``("grad",)`` of a leaf or
    ``("context",)`` of a context variable.

    A check is ``("plain", value)``, ``("is", object)``, ``("missing",)``, ``("kind", class)``,
    ``("list", class, length)``, ``("dict", class, keys or None, absent)``, ``("object", class,
    absent)``, ``("set", class, members)``, ``("function", function)`` with its code and defaults,
    ``("weak", reference)`` to an object that lives or does not, ``("class", class, absent)`` or
    ``("tensor", tensor)``: what lies where the tensor lies now, is laid out so, and requires a
    gradient or not, as it does. With ``("form", tensor)`` and ``("input", tensor)`` it may lie
    anywhere. Names in the frozen sets ``absent`` must not be there.

    No user code runs in a comparison, and a place that cannot be looked up counts as missing. The
    contents of an object of the caller's are held only once the same object has come twice in a
    row.
    """

    def __new__(
        cls,
        places: Sequence[tuple[int, tuple[Any, ...], tuple[Any, ...]]],
        reader: TensorReader | None = None,
    ) -> Self: ...
    def fits(self, objects: Sequence[object] = ...) -> bool:
        """Return whether all places are as expected."""
    def changed(
        self, objects: Sequence[object] = ..., *, all: bool = False
    ) -> list[tuple[int, Any, bool]]:
        """Return the first place that differs: its number, what is there, and whether anything is.

        With ``all``, return each place that differs and whose parents do not.
        """

@final
class LastStream:
    """The stream that the graphs of one pool were last replayed on."""

    def __new__(
        cls,
        device: Device,
        current: object,
        ordinal: int,
        switch: Callable[[int | None, int], object],
    ) -> Self:
        """Create it for a device and its number.

        ``current`` finds the current stream: a simulator, or a tuple of a ``dlpack_exchange_api``
        capsule or a callable that takes the number and returns the raw handle, and a callable that
        takes the number and tells whether that stream is torch's own. ``switch`` takes the last
        stream, None where it may be gone, and the one that is to wait for it.
        """
    def follow(self) -> None:
        """Make the current stream the last one; it waits for the one before."""

@final
class LentResults:
    """The static results of a pool that callers may have, until a replay overwrites them.

    Args:
        increment: Increments the versions of the tensors of a list.
    """

    def __new__(cls, increment: Callable[[list[Any]], object]) -> Self: ...
    def lend(self, own: list[Any]) -> None:
        """Note tensors that share their versions with what a caller has got.

        A replay has overwritten all others before.
        """
    def overwrite(self) -> None:
        """Increment the versions of all that are noted, and forget them."""

@final
class FunctionLock:
    """A lock that lets one thread at a time replay or capture the graphs of a function."""

    def __new__(cls) -> Self: ...
    @property
    def is_replaying(self) -> bool:
        """True if a replay is under way; only the thread that holds the lock asks."""
    def __enter__(self) -> None: ...
    def __exit__(self, *_error: object) -> None: ...
