"""The cache of compiled pieces on disk."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cgraph._piecewise.backend import _dump
from cgraph._piecewise.compile_cache import CompileCache, StoredPiece, key_of
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.pieces import Compiler, program_of
from cgraph._piecewise.size_guards import Guard
from cgraph._torch import form_of_graph
from cgraph.errors import ArgumentError, CgraphWarning
from cgraph.piecewise import PiecewiseConfig, mark_size, split_graph
from served import graph_of

pytestmark = [
    pytest.mark.timeout(300),
    # Inductor's own, about its modules.
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _own_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CGRAPH_DISABLE_COMPILE_CACHE", raising=False)
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def body(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.ops.served.routed(torch.relu(x @ weight))
    return (y * 2).cos()


class Start:
    """A start of a program: a model in two pieces, compiled for any size and for four."""

    def __init__(self, folder: Path) -> None:
        self.counters = Counters()
        self.programs: dict[int | None, Callable[..., Any]] = {}
        config = PiecewiseConfig(
            splitting_ops=("served::routed",),
            inductor_options=(("max_autotune", False),),
            cache_dir=str(folder),
        )

        def backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.cache = CompileCache.of(config, graph)
            compiler = Compiler(config, self.counters, self.cache, compiles=True)
            whole, items = split_graph(graph, config.splitting_ops)
            parts = [compiler.part(item) for item in items]
            self.programs[None] = program_of(
                whole, {one.item.submod_name: one.run for one in parts}
            )
            self.programs[4] = program_of(
                whole,
                {
                    one.item.submod_name: one.run
                    if one.item.is_splitting_graph
                    else compiler.sized(one, 4)
                    for one in parts
                },
            )
            return lambda *args: self.programs.get(len(args[1]), self.programs[None])(*args)

        torch.compiler.reset()
        self.fast = torch.compile(body, backend=backend)
        self.is_marked = False

    def check(self, *sizes: int) -> None:
        weight = torch.randn(8, 8)
        for size in sizes:
            x = torch.randn(size, 8)
            if not self.is_marked:
                mark_size(x)
                self.is_marked = True
            assert torch.allclose(self.fast(x, weight), body(x, weight), atol=1e-5)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one start has filled."""
    folder = tmp_path_factory.mktemp("pieces")
    with torch.no_grad():
        first = Start(folder)
        first.check(8, 4, 1)
    assert first.counters.inductor_compilations == 4
    assert first.counters.loaded == 0
    assert first.cache.folder is not None
    assert sorted(one.name for one in first.cache.folder.iterdir()) == [
        "piece_0_4",
        "piece_0_any",
        "piece_2_4",
        "piece_2_any",
    ]
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """A copy of that, to be changed."""
    return Path(shutil.copytree(filled, tmp_path / "copy"))


def test_a_second_start_compiles_nothing_and_is_right(folder: Path) -> None:
    second = Start(folder)
    second.check(8, 4, 1, 2, 5, 4)
    assert second.counters.inductor_compilations == 0
    assert second.counters.loaded == 4


def file_of(folder: Path) -> Path:
    (path,) = folder.rglob("piece_0_any")
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda old: old[: len(old) // 2], "its sha256 is"),
        (lambda old: old[:-1] + bytes([old[-1] ^ 1]), "its sha256 is"),
        (lambda old: b"PK" + old, "it is no file of cgraph's"),
        (lambda old: b"", "it is no file of cgraph's"),
        (lambda old: b"cgraph piece 2\n__import__('os')\n" + old, "Expecting value"),
        (lambda old: old.replace(b'"torch": "', b'"torch": "9', 1), "its torch is '9"),
        (lambda old: old.replace(b'"guards": []', b'"guards": [["exec", "1"]]', 1), "not known"),
    ],
)
def test_a_file_that_is_not_as_expected_is_named_refused_and_rebuilt(
    folder: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    path = file_of(folder)
    old = path.read_bytes()
    path.write_bytes(change(old))
    with pytest.warns(CgraphWarning, match=f"piece_0_any is refused.*{reason}"):
        start = Start(folder)
        start.check(8, 3)
    assert start.counters.inductor_compilations == 1
    again = Start(folder)
    again.check(8)
    assert again.counters.inductor_compilations == 0


def test_what_torch_cannot_open_is_named_and_rebuilt(folder: Path) -> None:
    cache = Start(folder)
    cache.check(8)
    cache.cache.put(0, None, StoredPiece(b"not torch's"))
    with pytest.warns(CgraphWarning, match="piece_0_any is refused"):
        start = Start(folder)
        start.check(8)
    assert start.counters.inductor_compilations == 1


def test_a_size_that_breaks_a_guard_is_compiled_alone(folder: Path) -> None:
    start = Start(folder)
    start.check(8)
    stored = start.cache.get(0, None)
    assert stored is not None
    (symbol,) = ("u0",)
    guard = Guard.of(sympy.Eq(sympy.Mod(sympy.Symbol(symbol), 2), 0))
    start.cache.put(0, None, StoredPiece(stored.code, (guard,)))
    second = Start(folder)
    second.check(8, 2, 6)
    assert second.counters.inductor_compilations == 0
    second.check(3, 3, 5, 3)
    assert second.counters.inductor_compilations == 2


def test_guards_are_kept_as_literals() -> None:
    s, t = sympy.symbols("s t", integer=True)
    for condition, values, expected in [
        (sympy.Eq(sympy.Mod(s, 8), 0), {"s": 16}, True),
        (sympy.Eq(sympy.Mod(s, 8), 0), {"s": 12}, False),
        (s * t + 3 > 20, {"s": 4, "t": 5}, True),
        (sympy.And(s >= 2, sympy.Ne(s, 7)), {"s": 7}, False),
        (sympy.Or(s < 2, s**2 >= 49), {"s": 7}, True),
        (s > 2, {"t": 5}, False),
    ]:
        guard = Guard.of(condition)
        again = Guard.parsed([*guard])
        assert again == guard
        assert again.holds(values) is expected
    with pytest.raises(ValueError, match="not known"):
        Guard.of(sympy.Eq(sympy.sin(s), 0))
    for wrong in ("s", 3, [], ["eval", "1"], ["Add", ["open", "x"]], ["Add", 1.5]):
        with pytest.raises(ValueError, match="guard"):
            Guard.parsed(wrong)


def function_in(path: Path, source: str) -> Any:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("traced", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def test_the_key_depends_on_files_configuration_inputs_and_modes(tmp_path: Path) -> None:
    path, x = tmp_path / "traced.py", torch.ones(4)
    source = "def f(x):\n    return x * 2 + 1\n"
    config = PiecewiseConfig(capture_sizes=(4,))
    key = key_of(config, graph_of(function_in(path, source), x))
    same = key_of(PiecewiseConfig(warmups=3), graph_of(function_in(path, source), x))
    assert same == key
    others = [
        key_of(config, graph_of(function_in(path, f"# new\n{source}"), x)),
        key_of(config, graph_of(function_in(path, source), x.double())),
        key_of(
            PiecewiseConfig(splitting_ops=("aten::sin",)), graph_of(function_in(path, source), x)
        ),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        others.append(key_of(config, graph_of(function_in(path, source), x)))
    assert len({key, *others}) == 5


def test_a_piece_whose_code_is_elsewhere_is_neither_stored_nor_shared() -> None:
    library = torch.library.Library("cached", "DEF")
    library.define("composite(Tensor x) -> Tensor")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x + 1, "CompositeImplicitAutograd")
    library.impl("opaque", lambda x: x + 1, "CompositeExplicitAutograd")
    library._register_fake("opaque", lambda x: torch.empty_like(x))
    constant, x = torch.arange(4.0), torch.ones(4)

    @torch._dynamo.allow_in_graph
    def mine(x: Tensor) -> Tensor:
        return x + 1

    def kept(x: Tensor) -> Tensor:
        return x * constant

    forms = [
        form_of_graph(graph_of(lambda x: torch.ops.cached.composite(x) * 2, x)),
        form_of_graph(graph_of(lambda x: mine(x) * 2, x)),
        form_of_graph(make_fx(kept)(x)),
    ]
    assert forms == [None, None, None]
    one = graph_of(lambda x: torch.ops.cached.opaque(x) * 2, x)
    other = graph_of(lambda x: torch.ops.cached.opaque(x) * 3, x)
    assert form_of_graph(one) is not None
    assert form_of_graph(one) != form_of_graph(other)
    config = PiecewiseConfig(inductor_options=(("max_autotune", False),))
    assert key_of(config, one) != key_of(config, other)


def test_a_cache_that_is_off_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(torch.sin, torch.ones(4))
    monkeypatch.setenv("CGRAPH_CACHE_DIR", str(tmp_path / "off"))
    assert CompileCache.of(PiecewiseConfig(cache=False), graph).folder is None
    monkeypatch.setenv("CGRAPH_DISABLE_COMPILE_CACHE", "1")
    off = CompileCache.of(PiecewiseConfig(), graph)
    off.put(0, None, StoredPiece(b"code"))
    assert off.get(0, None) is None
    assert not (tmp_path / "off").exists()
    with pytest.raises(ArgumentError, match="cache_dir is '/tmp/x', and cache is False"):
        PiecewiseConfig(cache=False, cache_dir="/tmp/x")


def test_each_rank_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(torch.sin, torch.ones(4))
    monkeypatch.setenv("CGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    folder = CompileCache.of(PiecewiseConfig(), graph).folder
    assert folder is not None
    assert folder.name == "rank_3"
    assert folder.is_relative_to(tmp_path / "pieces")


def test_a_folder_that_cannot_be_written_is_named_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CgraphWarning, match="is not used, so pieces are compiled at each start"):
        cache = CompileCache(tmp_path / "file" / "below", "key")
    assert cache.folder is None
    assert cache.get(0, None) is None


def test_files_that_several_write_at_once_are_whole(tmp_path: Path) -> None:
    caches = [CompileCache(tmp_path, "key") for _ in range(3)]
    codes = [bytes([number]) * 200_000 for number in range(3)]
    wrong: list[object] = []

    def write(number: int) -> None:
        for _ in range(50):
            caches[number].put(0, 8, StoredPiece(codes[number]))
            found = caches[number].get(0, 8)
            if found is None or found.code not in codes:
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [one.name for one in tmp_path.iterdir()] == ["piece_0_8"]
    # Another model's file is none of this one's.
    with pytest.warns(CgraphWarning, match="its key is 'key', expected 'other'"):
        assert CompileCache(tmp_path, "other").get(0, 8) is None


def test_the_checksum_counts_the_guards_too(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, "key")
    cache.put(0, None, StoredPiece(b"code", (Guard(("LessThan", "s0", 8)),)))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"s0", 8', b'"s0", 9'))
    with pytest.warns(CgraphWarning, match="its sha256 is"):
        assert cache.get(0, None) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused_and_written_anew(
    tmp_path: Path, mode: int
) -> None:
    cache = CompileCache(tmp_path, "key")
    cache.put(0, None, StoredPiece(b"code"))
    file_of(tmp_path).chmod(mode)
    with pytest.warns(CgraphWarning, match=r"others may write to .*piece_0_any.*chmod go-w"):
        assert cache.get(0, None) is None
    cache.put(0, None, StoredPiece(b"code"))
    found = cache.get(0, None)
    assert found is not None
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["root", "root/pieces", "root/pieces/rank_0"])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    folder = root / "pieces" / "rank_0"
    assert CompileCache(folder, "key", root).folder is not None
    (tmp_path / place).chmod(0o777)
    with pytest.warns(CgraphWarning, match="others may write to .*so pieces|is not used"):
        assert CompileCache(folder, "key", root).folder is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_and_a_file_of_another_user_are_refused(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "own", "key")
    cache.put(0, None, StoredPiece(b"code"))
    os.chown(file_of(tmp_path / "own"), 65534, 65534)
    with pytest.warns(CgraphWarning, match="belongs to user 65534"):
        assert cache.get(0, None) is None
    os.chown(tmp_path / "own", 65534, 65534)
    with pytest.warns(CgraphWarning, match="belongs to user 65534"):
        assert CompileCache(tmp_path / "own", "key").folder is None


def test_folders_are_made_for_their_user_alone_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        CompileCache(tmp_path / "a" / "b", "key", tmp_path / "a")
    finally:
        os.umask(before)
    modes = [one.stat().st_mode & 0o777 for one in (tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o700, 0o700]


def test_what_is_no_plain_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, "key")
    os.mkfifo(tmp_path / "piece_0_any", 0o600)
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "piece_1_any").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "piece_2_any").mkdir(0o700)
    for number in range(3):
        with pytest.warns(CgraphWarning, match=f"piece_{number}_any cannot be read"):
            assert cache.get(number, None) is None


@pytest.mark.parametrize(
    "guards",
    ["[" * 100_000, '[[["Add"], 1]]', '[["LessThan", "s0"]]', '[["Not", 1, 2]]', '[["Add"]]'],
)
def test_guards_that_are_none_are_refused(tmp_path: Path, guards: str) -> None:
    cache = CompileCache(tmp_path, "key")
    cache.put(0, None, StoredPiece(b"code"))
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"guards": []', f'"guards": {guards}'.encode()))
    with pytest.warns(CgraphWarning, match="piece_0_any is refused"):
        assert cache.get(0, None) is None


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "abc"), ("CGRAPH_CACHE_DIR", "~nobody_of_this_name/x")]
)
def test_a_setting_that_names_no_folder_is_told_and_the_cache_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("CGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(name, value)
    with pytest.warns(CgraphWarning, match=f"{value}|determine home"):
        cache = CompileCache.of(PiecewiseConfig(), graph_of(torch.sin, torch.ones(4)))
    assert cache.folder is None


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path, "key")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CgraphWarning, match=r"cannot be written.*No space left"):
        cache.put(0, None, StoredPiece(b"code"))
    graph = graph_of(torch.sin, torch.ones(4))
    with (
        pytest.warns(CgraphWarning, match=r"traced_graph.py cannot be written"),
        pytest.warns(CgraphWarning, match=r"computation_graph.py cannot be written"),
    ):
        _dump(tmp_path, traced=graph, split=graph)
    assert list(tmp_path.iterdir()) == []
