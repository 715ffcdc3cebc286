"""The native half of cgraph: cg-core for Python. Not a public interface."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

from typing_extensions import Self, disjoint_base

__all__ = [
    "Block",
    "Capture",
    "CaptureMark",
    "Device",
    "Dispatcher",
    "Entry",
    "Event",
    "Fresh",
    "Graph",
    "Guards",
    "HookHandle",
    "Inputs",
    "Lane",
    "Outputs",
    "PaddedGraph",
    "Pool",
    "Segments",
    "Signature",
    "Sim",
    "Stream",
    "Template",
    "TensorReader",
    "Tracker",
    "Turn",
    "begin_and_hand_over",
    "begin_exit",
    "end_broken",
    "enter_busy",
    "is_any_busy",
    "leave_busy",
    "register_for_all",
    "set_driver",
    "settle_pools",
    "take_refusal",
    "version",
    "watches_dictionaries",
]

def begin_exit() -> None:
    """Tell cgraph that the interpreter exits: no object calls the driver any more."""

def settle_pools() -> None:
    """Gives back what torch has released and what could not go back at once."""

def take_refusal(bytes: int) -> BaseException | None:
    """The exception for the last segment of so many bytes that this thread was refused."""

def version() -> str:
    """The version of the native half."""

def watches_dictionaries() -> bool:
    """Whether Python tells of changes of dictionaries, so that guards need not look at all."""

def begin_and_hand_over(stream: Stream) -> None:
    """Begin a relaxed capture that somebody else ends. It has a node that does nothing."""

def register_for_all(phase: str, hook: Callable[..., object]) -> HookHandle:
    """Add a callable to the hooks of all graphs.

    ``phase`` is ``"capture_start"``, ``"capture_end"``, ``"instantiate"``, ``"replay_start"``,
    ``"replay_end"`` or ``"destroy"``.
    """

def enter_busy() -> None:
    """Count a thread that begins to run a function for a capture; graphed ones ask which then."""

def is_any_busy() -> bool:
    """Whether some thread does."""

def leave_busy() -> None:
    """Count a thread that has ended to."""

def set_driver(number: int) -> None:
    """Say which driver is in force, by a number that no other one has; at first it is 0."""

def end_broken(stream: Stream) -> None:
    """End a capture that somebody else began, if the stream captures, and drop its work."""

@final
class Device:
    """One GPU, real or simulated."""

    @staticmethod
    def cuda(ordinal: int) -> Device:
        """The GPU with this number; raises ``NoDriverError`` without a usable driver."""
    @staticmethod
    def sim(sim: Sim) -> Device:
        """A simulated device."""
    @property
    def name(self) -> str:
        """The driver and device, as in ``cuda:0``."""
    @property
    def driver_version(self) -> int:
        """The driver's version as CUDA numbers it: 12040 is 12.4."""
    def memory_range(self, address: int) -> tuple[int, int] | None:
        """Start and size of the allocation that an address lies in; None if nothing is there."""
    def word(self, address: int) -> int | None:
        """The eight bytes at an address, as a number; None if nothing is there."""
    def has_captures(self) -> bool:
        """Whether a capture is open that cgraph knows of."""
    def mark_capture(self) -> CaptureMark:
        """Says that others have begun a capture, until the result is dropped."""
    def collect(self) -> int:
        """Drop what only finished work still used; returns how many things wait."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Stream:
    """A queue of work on a device."""

    def __new__(cls, device: Device, *, handle: int | None = None) -> Self:
        """A new stream, or with ``handle`` an existing one, which must outlive its replays."""
    @property
    def handle(self) -> int:
        """The raw stream; zero is the legacy default stream."""
    @property
    def device(self) -> Device:
        """Its device."""
    def synchronize(self) -> None:
        """Wait until all work has finished."""
    def query(self) -> bool:
        """Whether all work has finished."""
    def is_capturing(self) -> bool:
        """Whether it captures."""
    def wait_stream(self, stream: Stream) -> None:
        """Make later work wait for what is enqueued on another stream now."""
    def wait_event(self, event: Event) -> None:
        """Make later work wait for the event."""
    def record_event(self, event: Event) -> None:
        """Record the event behind all work enqueued so far."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Event:
    """A point in a stream's work that others can wait for."""

    def __new__(cls, device: Device) -> Self: ...
    def query(self) -> bool:
        """Whether the work before the last record has finished."""
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
        """Take over a capture that somebody else began."""
    def finish(self) -> Template:
        """End the capture and make the template."""

@final
class Tracker:
    """Follows an open capture: which nodes are new in it."""

    def __new__(cls, stream: Stream) -> Self:
        """Follow the capture that is open on the stream."""
    def new_nodes(self, current: Stream) -> list[int]:
        """The raw nodes that no earlier look has returned.

        None if ``current`` is no stream of the capture, or the capture was made unusable.
        """

@final
class Template:
    """A graph that can change and cannot run."""

    @staticmethod
    def from_raw(device: Device, handle: int) -> Template:
        """A graph of somebody else, who keeps it alive."""
    @property
    def handle(self) -> int:
        """The raw graph."""
    @property
    def graph_id(self) -> int | None:
        """The number by which tools know the graph; None from a driver older than CUDA 13.1."""
    def node_count(self) -> int:
        """How many nodes it has; those of child graphs are not counted."""
    def count(self) -> int:
        """How many nodes it has, those of child graphs included."""
    def addresses(self) -> list[tuple[str | None, int, int, int]]:
        """What its nodes name: node's name, address, start and size of the allocation there."""
    def json(self) -> str:
        """Nodes and edges as JSON text."""
    def dot(self, verbose: bool) -> str:
        """Nodes and edges as a Graphviz graph."""
    def add_child(self, child: Template) -> None:
        """Add a node that runs a copy of another template, after no other node."""
    def copy(self) -> Template:
        """A copy, with nodes of its own."""
    def copy_mapped(self) -> tuple[Template, dict[int, int]]:
        """A copy, and its raw nodes by those that they are copies of."""
    def clear(self) -> None:
        """Remove all nodes."""
    def retain(self, object: object) -> None:
        """Keep an object alive as long as the template, its execs and their replays in flight."""
    def retain_pool(self, pool: Pool) -> None:
        """Keep a pool's segments alive as long as the template and its execs."""

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
    _keep_graph: bool
    def _adopt(
        self,
        template: Template,
        *,
        current: object,
        ordinal: int | None,
        check: Callable[[], None] | None,
        random_step: Callable[[], None] | None,
        inputs: Inputs | None,
        generators: Sequence[tuple[Any, int]],
        sim: Sim | None,
        retained: object,
        outputs: Outputs | None = None,
    ) -> None: ...
    def _register(self, phase: str, hook: Callable[..., object]) -> HookHandle: ...
    def _run_hooks(self, phase: str) -> None: ...
    def _has_hooks(self, phase: str) -> bool: ...
    def _register_destroy(
        self, callback: Callable[[], object], synchronize: bool
    ) -> HookHandle: ...
    def _retain(self, object: object, synchronize: bool) -> HookHandle: ...
    def _end_cycle(self) -> None: ...
    def _instantiate(self) -> None: ...
    def _drop_template(self) -> None: ...
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
    """Takes back a registration: ``remove()``, or at the end of a ``with`` block."""

    @property
    def id(self) -> int:
        """A number that no other registration has."""
    def remove(self) -> None:
        """Take the registration back; nothing happens if it is gone."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class TensorReader:
    """Reads address, layout and device of tensors."""

    def __new__(
        cls,
        tensor_type: type,
        exchange_api: object | None,
        functions: dict[str, int] | None = None,
        samples: Sequence[object] = ...,
        fields: dict[str, int] = ...,
    ) -> Self:
        """``exchange_api`` is the type's ``__dlpack_c_exchange_api__``, if it has one.

        torch's stable C functions, of which ``functions`` has the addresses, are faster; they read
        tensors that are of just the classes of the samples. Where some are missing, or the samples'
        objects are built in another way than in the torch versions known, the exchange API reads
        all. So it does after a tensor that they could not read. What has the ``fields`` is compared
        without them.
        """
    @property
    def uses_stable_functions(self) -> bool:
        """Whether torch's stable functions read what they can."""
    @property
    def uses_fields(self) -> bool:
        """Whether tensors are read by their fields where they can."""
    def requires_grad(self, tensor: object) -> bool:
        """Whether a tensor requires a gradient.

        By a function of torch's that is not stable, if it is known and was right for the samples.
        """

@final
class Signature:
    """What a static tensor takes."""

    def __new__(cls, reader: TensorReader, tensor: object) -> Self: ...
    def check(self, tensor: object, index: int = 0) -> tuple[Literal["same", "copy", "torch"], int]:
        """How a tensor gets into the static one.

        It is there (``"same"``), a copy of the bytes at the address brings it there (``"copy"``),
        or torch must copy it (``"torch"``). Raises ``ArgumentError`` naming the argument ``index``
        if shape, dtype or device differ.
        """
    @property
    def address(self) -> int:
        """Where the static tensor begins."""
    @property
    def nbytes(self) -> int:
        """How many bytes its elements have together."""
    @property
    def is_dense(self) -> bool:
        """Whether the elements lie side by side, so that bytes can be copied."""

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
        """The address that a replay copies to each static tensor from.

        It is the tensor's own where nothing is to be copied, or where torch has just copied.
        """

@final
class Outputs:
    """Last nodes of a template that copy its memory to where each replay says."""

    def __new__(cls, template: Template, storages: Sequence[tuple[int, int]]) -> Self: ...
    def __len__(self) -> int: ...

@final
class Fresh:
    """Makes new tensors that are like the results of a graph."""

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
        """Whether torch's C functions make them."""
    def make(self) -> tuple[list[Any], list[tuple[int, int]]]:
        """New tensors, and address and bytes of where each piece of memory is to be copied to."""

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
    """Graphs, and what runs eagerly between them; behind :class:`cgraph.SegmentedGraph`."""

    def __new__(
        cls,
        steps: Sequence[Graph | Callable[[], object] | tuple[Any, ...]],
        modes: tuple[Callable[[], bool], Callable[[], bool], Callable[[], bool]],
    ) -> Self:
        """Steps in order: graphs, callables, and calls that need nothing around them.

        Such a call is ``(callable, function, args, kwargs, (grad, inference), take, is_none)``: the
        callable stands for it under other modes of torch's, which the functions ``modes`` tell.
        Raises ``ArgumentError`` for a step that is none of these.
        """
    def replay(self) -> None:
        """Replay the graphs on the current stream and call the callables, each in its turn.

        What a step raises stops the run; the next replay begins with the first step. Raises
        ``StateError`` if there is no step.
        """
    def _replay_with(self, tensors: tuple[Any, ...]) -> None:
        """As ``replay``, with each tensor copied into its static input of the first graph."""
    def _replay_into(self, tensors: tuple[Any, ...] | None, to: Sequence[tuple[int, int]]) -> None:
        """As ``_replay_with`` or ``replay``, and the last graph copies its outputs there."""
    @property
    def _is_running(self) -> bool:
        """Whether a replay is under way, as seen from a step or another thread."""
    def _clear(self) -> None: ...

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
        """Its device."""
    @property
    def limit(self) -> int | None:
        """The most bytes that its segments may have."""
    @property
    def reserved(self) -> int:
        """Bytes of its segments."""
    @property
    def is_paused(self) -> bool:
        """Whether its memory is given back."""
    def functions(self) -> tuple[int, int, int]:
        """A number for the functions that torch's allocator calls, and their addresses."""
    def allocate(self, stream: Stream, bytes: int) -> Block:
        """A block for work on a stream; given back when the last reference to it goes."""
    def segments(self) -> list[Block]:
        """The segments of the simulator, whole."""
    def stats(self) -> list[tuple[str, int]]:
        """Bytes by name; see ``cgraph.MemPool.stats``."""
    def segment_stats(self) -> list[tuple[int, int, int]]:
        """Address, bytes and bytes in use of each segment."""
    def ranges(self) -> list[tuple[int, int]]:
        """Start and bytes of each range of addresses."""
    def trim(self) -> int:
        """Gives wholly free segments back; how many bytes that were."""
    def pause(self, keep: str) -> None:
        """Gives all memory back: `discard` or `host` says what becomes of the contents."""
    def resume(self) -> None:
        """Maps memory at the same addresses again."""

@final
class Block:
    """A range of simulated device memory, with the host memory behind it."""

    @property
    def address(self) -> int:
        """Where it starts on the device."""
    @property
    def host_address(self) -> int:
        """Where the host memory behind it starts."""
    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
    def poison(self) -> None:
        """Overwrite it with the simulator's poison."""

@final
class Sim:
    """A simulated device and its driver."""

    def __new__(cls, *, seed: int = 0, memory: int = ..., driver_version: int = 13000) -> Self: ...
    def launch(self, stream: Stream, name: str, kernel: Callable[[], object]) -> None:
        """Enqueue a callable as a kernel, or record it where the stream captures."""
    def add_conditional(self, template: Template, bodies: list[Template]) -> None:
        """Add a conditional node that chooses from copies of the bodies; replays panic."""
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
        """How many objects of each kind exist."""
    def calls(self) -> list[str]:
        """CUDA's names of the calls made so far."""

@disjoint_base
class Dispatcher:
    """A function's entries. A call that fits one is a replay of it, any other goes to `_miss`."""

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
    ) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the entry that the arguments fit."""
    @property
    def _is_followed(self) -> bool:
        """Whether a transform of ``torch.func``, a mode or a tracer sees operators."""
    def add(self, entry: Entry) -> None:
        """Add an entry, as the one that was used last."""
    def remove(self, entry: Entry) -> bool:
        """Take an entry out; whether it was there."""
    @property
    def entries_by_use(self) -> list[Entry]:
        """The entries, the one that was used last first."""

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
        lane: Lane | None,
        turn: Turn | None,
        guards: Guards | None = None,
        written: Sequence[tuple[int, int]] = ...,
        has_breaks: bool = False,
        is_open: Callable[[], bool] | None = None,
    ) -> Self:
        """``outputs`` is ``(leaves, build, warn)``; without, ``work`` returns the result.

        A leaf is ``("static", tensor, signature)``, ``("copied", tensor)``, ``("fresh", number,
        fresh)``, ``("argument", place)``, ``("view", place, make)`` or ``("constant", value)``:
        ``make`` takes the tensor that the caller gave at that place, and returns a view of it.
        ``build`` is ``"single"``, ``"tuple"`` or takes a list of leaves. ``warn`` is called once,
        before the replay that overwrites a static result of the call before last that lives.
        """
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]) -> Any:
        """Serve a call whose tensors were found, however they are laid out."""
    @property
    def replays(self) -> int:
        """How many calls it has served."""
    @property
    def eager_calls(self) -> int:
        """How many calls it has answered without a replay."""
    @property
    def last_use(self) -> int:
        """When it was made or replayed last: the later, the larger."""

@final
class Guards:
    """What a function finds outside of its arguments, and in objects among them, as it must be.

    A place is ``(parent, step, check)``. Parents come first; that of a root is -1. A step is
    ``("root", object)``, ``("object", k)`` for one that the caller of ``fits`` gives, ``("attr",
    name)`` of the object's own dictionary, ``("class", name)`` of its class without descriptors,
    ``("slot", member_descriptor)``, ``("item", key)``, ``("cell",)`` or ``("grad",)`` of a leaf.

    A check is ``("plain", value)``, ``("is", object)``, ``("missing",)``, ``("kind", class)``,
    ``("list", class, length)``, ``("dict", class, length or None, absent)``, ``("object", class,
    absent)``, ``("set", class, members)`` or ``("tensor", tensor)``: what lies where the tensor
    lies now, is laid out so, and requires a gradient or not, as it does. Names in the frozen sets
    ``absent`` must not be there.

    No code of the user's runs in a comparison, and what cannot be looked up is not there. What is
    found in an object of the caller's is held only once the same one has come twice in a row.
    """

    def __new__(
        cls,
        places: Sequence[tuple[int, tuple[Any, ...], tuple[Any, ...]]],
        reader: TensorReader | None = None,
    ) -> Self: ...
    def fits(self, objects: Sequence[object] = ...) -> bool:
        """Whether all places are as they must be."""
    def changed(
        self, objects: Sequence[object] = ..., *, all: bool = False
    ) -> list[tuple[int, Any, bool]]:
        """The first place that differs: its number, what is there, and whether anything is.

        With ``all`` each one whose parents do not differ.
        """

@final
class Lane:
    """The stream that the graphs of one pool were last replayed on."""

    def __new__(
        cls, device: Device, current: object, ordinal: int, switch: Callable[[int, int], object]
    ) -> Self: ...

@final
class Turn:
    """Lets one thread at a time replay or capture the graphs of a function."""

    def __new__(cls) -> Self: ...
    @property
    def is_replaying(self) -> bool:
        """Whether a replay with breaks is under way; only the thread that has the turn asks."""
    def __enter__(self) -> None: ...
    def __exit__(self, *_error: object) -> None: ...
