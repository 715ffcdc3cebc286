"""Static inputs that move, and threads that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import cudagraph_trees

import cgraph
from cgraph import _torch
from cgraph.errors import CgraphWarning, EagerWarning
from lab import Lab, fresh
from process_group import only_process
from tree_programs import graphs_of, in_tree, step


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only process of a group."""
    with only_process():
        yield


def lent(memory: Tensor, place: int) -> Tensor:
    """Return a tensor over a part of memory that is nobody else's while it lives."""
    [one] = _torch.unowned([memory[place]])
    return one


@pytest.mark.parametrize(("calls", "graphs"), [(7, 3), (10, 6)])
def test_1_23_and_1_45_only_a_graph_that_serves_eight_replays_clears_the_count(
    lab: Lab, calls: int, graphs: int
) -> None:
    options = {"max_rerecords": 2}
    fast = in_tree(
        lab, torch.add, fresh(lab, 4), fresh(lab, 4), static_input_idxs=[1], options=options
    )
    kept = []
    told = pytest.warns(EagerWarning, match=r"moved from 0x.*Fix: write new weights in place")
    with told if graphs < 6 else nullcontext():
        for _ in range(6):
            kept.append(fresh(lab, 4))
            for _ in range(calls):
                step()
                x = fresh(lab, 4)
                assert torch.equal(fast(x, kept[-1]), x + kept[-1])
    assert graphs_of(fast) == graphs


def test_1_24_a_function_has_a_count_for_each_function_before_it(lab: Lab) -> None:
    options = {"max_rerecords": 2}
    fast = in_tree(
        lab, torch.add, fresh(lab, 4), fresh(lab, 4), static_input_idxs=[1], options=options
    )
    before = [in_tree(lab, torch.sin, fresh(lab, 4)), in_tree(lab, torch.cos, fresh(lab, 4))]
    kept = []
    with pytest.warns(EagerWarning, match="write new weights in place"):
        for number in range(20):
            kept.append(fresh(lab, 4))
            step()
            x = before[number % 2](fresh(lab, 4))
            assert torch.equal(fast(x, kept[-1]), x + kept[-1])
    assert graphs_of(fast) == 6


def test_1_44_an_input_that_is_static_in_name_only_becomes_a_copied_one(lab: Lab) -> None:
    fast = in_tree(lab, torch.add, fresh(lab, 4), fresh(lab, 4), static_input_idxs=[1])
    memory = fresh(lab, 16, 4)
    with pytest.warns(CgraphWarning, match=r"copies inputs.*elsewhere in four.*: input 1"):
        for place in range(16):
            step()
            x = fresh(lab, 4)
            assert torch.equal(fast(x, lent(memory, place)), x + memory[place])
    [one] = cgraph.trees.report().functions
    # The first one has not moved.
    assert (one.graphs, one.replays, one.copied_bytes) == (5, 10, 32)
    assert one.moving == "input 1"
    assert "32 B are copied in each call, as these moved: input 1" in str(cgraph.trees.report())


def test_an_input_that_is_written_stays_where_it_is_however_often_it_moves(lab: Lab) -> None:
    def added(x: Tensor, total: Tensor) -> Tensor:
        return total.add_(x) * 2

    places = {"static_input_idxs": [1], "mutated_input_idxs": [1]}
    fast = in_tree(lab, added, fresh(lab, 4), fresh(lab, 4), **places)
    memory = fresh(lab, 14, 4)
    for place in range(14):
        step()
        x = fresh(lab, 4)
        expected = memory[place] + x
        assert torch.equal(fast(x, lent(memory, place)), expected * 2)
        assert torch.equal(memory[place], expected)
    [one] = cgraph.trees.report().functions
    assert (one.graphs, one.moving) == (13, None)


def test_an_input_in_the_memory_of_a_written_one_is_never_copied(lab: Lab) -> None:
    def added(x: Tensor, total: Tensor, view: Tensor) -> Tensor:
        total.add_(x)
        return view * 2

    example = [fresh(lab, 4), fresh(lab, 2, 2), fresh(lab, 4)]
    places = {"static_input_idxs": [1, 2], "mutated_input_idxs": [1]}
    fast = in_tree(lab, lambda x, t, v: added(x.view(2, 2), t, v), *example, **places)
    memory = fresh(lab, 14, 2, 2)
    for place in range(14):
        step()
        x, total = fresh(lab, 4), lent(memory, place)
        expected = (total + x.view(2, 2)).view(4) * 2
        assert torch.equal(fast(x, total, total.view(4)), expected)


def test_layers_of_one_code_with_eager_work_between_them_keep_their_weights_in_place(
    lab: Lab,
) -> None:
    torch.compiler.reset()
    blocks = nn.ModuleList(Block() for _ in range(12)).to(lab.device)
    for block in blocks:
        block.compile(backend="cgraph")

    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 4, 8)
            for block in blocks:
                x = x + block(x)
    functions = cgraph.trees.report().functions
    assert [one.moving for one in functions] == [None] * len(functions)
    assert sum(one.graphs for one in functions) == 12


def test_1_31_every_static_input_that_moved_is_named_with_both_addresses(lab: Lab) -> None:
    def total(*tensors: Tensor) -> Tensor:
        return torch.stack(tensors).sum(0)

    example = [fresh(lab, 4) for _ in range(7)]
    fast = in_tree(lab, total, *example, static_input_idxs=range(6))
    before, after = ([fresh(lab, 4) for _ in range(6)] for _ in range(2))
    for weights in (before, before, before, after):
        step()
        fast(*weights, fresh(lab, 4))
    [one] = cgraph.trees.report().functions
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        moved = f"input {place} moved from {old.data_ptr():#x} to {new.data_ptr():#x}"
        assert moved in (one.moved or "")


class Block(nn.Module):
    """A layer whose code is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + x


def trained(model: nn.Module, calls: Callable[[Tensor], Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Return the losses of a few steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x in xs:
        loss = calls(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
@pytest.mark.parametrize("wrapped", ["inside", "outside"])
def test_a_model_inside_of_ddp_is_captured(backend: str, wrapped: str) -> None:
    torch.compiler.reset()
    with cgraph.sim.use():
        torch.manual_seed(5)
        models = [nn.Sequential(Block(), Block()) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        parallel = nn.parallel.DistributedDataParallel
        if wrapped == "inside":
            fast: nn.Module = parallel(torch.compile(models[0], backend=backend))  # type: ignore[arg-type]
        else:
            one = Block()
            models[0] = one
            models[1] = Block()
            models[1].load_state_dict(one.state_dict())
            fast = torch.compile(parallel(one), backend=backend)  # type: ignore[assignment]
        xs = [torch.randn(4, 8) for _ in range(6)]
        found, expected = trained(models[0], fast, xs), trained(models[1], models[1], xs)
        report = cgraph.trees.report()
    torch.testing.assert_close(found, expected)
    assert sum(one.replays for one in report.functions) >= 8, str(report)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
def test_weights_that_are_gathered_for_each_step_become_inputs_of_replays(
    lab: Lab, backend: str
) -> None:
    torch.compiler.reset()
    models = [nn.Sequential(*[Block() for _ in range(4)]).to(lab.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for block in models[0]:
        block.compile(backend=backend)
    weights = list(models[0].parameters())
    gathered = {one: torch.empty(24, *one.shape, device=lab.device) for one in weights}
    steps = iter(range(24))

    def step_with_new_memory(x: Tensor) -> Tensor:
        # As fully_shard does.
        place = next(steps)
        for weight in weights:
            gathered[weight][place].copy_(weight.data)
            weight.data = lent(gathered[weight], place)
        found: Tensor = models[0](x)
        return found

    xs = [fresh(lab, 4, 8) for _ in range(24)]
    with pytest.warns(CgraphWarning, match="fully_shard"):
        found = trained(models[0], step_with_new_memory, xs)
    expected = trained(models[1], models[1], xs)
    report = cgraph.trees.report()
    torch.testing.assert_close(found, expected)
    last_steps = 12
    assert sum(one.replays for one in report.functions) >= last_steps * 8, str(report)
    torch.compiler.reset()


def test_a_reset_forgets_marks_of_both_kinds_also_where_torch_counts_anew(lab: Lab) -> None:
    fast = torch.compile(torch.sin, backend="cgraph_aot")
    for _ in range(3):
        step()
        torch.compiler.cudagraph_mark_step_begin()
        fast(fresh(lab, 4))
    torch.compiler.reset()
    # As torch does it itself where a thread has used its trees.
    cudagraph_trees.MarkStepBox.mark_step_counter = 0
    several = [in_tree(lab, one, fresh(lab, 4)) for one in (torch.sin, torch.cos)]
    for _ in range(4):
        for one in several:
            one(fresh(lab, 4))
    # In one marked step, they would be put off.
    assert [graphs_of(one) for one in several] == [1, 1]


@pytest.mark.usefixtures("alone")
def test_a_report_without_functions_says_that_torch_gave_no_backend_a_graph() -> None:
    torch.compiler.reset()
    with cgraph.sim.use():
        inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fast = torch.compile(nn.parallel.DistributedDataParallel(inner), backend="cgraph")
        fast(torch.randn(2, 4))
        text = str(cgraph.trees.report())
    assert "compile modules of your own, or the model before it is wrapped" in text
    torch.compiler.reset()


def test_a_new_thread_for_each_request_replays_what_the_thread_before_it_captured(
    lab: Lab,
) -> None:
    fast = torch.compile(torch.sin, backend="cgraph_aot")

    def request() -> None:
        x = torch.randn(8).to(lab.device)
        assert torch.allclose(fast(x), x.sin())

    # Without a GPU, torch's compiler ends the process in a thread.
    with torch.no_grad():
        request()
    for _ in range(6):
        in_new_thread(request)
    # Earlier threads that wait for work may have trees of their own.
    assert (1, 4) in [(one.graphs, one.replays) for one in cgraph.trees.report().functions]


def test_a_thread_that_ended_with_a_loss_leaves_no_step_open_for_the_next_one(lab: Lab) -> None:
    model = nn.Linear(4, 4).to(lab.device)
    fast = torch.compile(model, backend="cgraph")
    held: list[Tensor] = []

    def forward_only() -> None:
        with torch.enable_grad():
            for _ in range(3):
                held.append(fast(torch.ones(2, 4, device=lab.device)).sum())

    def train() -> None:
        with torch.enable_grad():
            for _ in range(12):
                fast(torch.ones(2, 4, device=lab.device)).sum().backward()

    # Without a GPU, torch's compiler ends the process in a thread.
    fast(torch.ones(2, 4, device=lab.device)).sum().backward()
    in_new_thread(forward_only)
    in_new_thread(train)
    trees = cgraph.trees.report().trees
    assert max(one.longest for one in trees) <= 4, str(cgraph.trees.report())


def in_new_thread(work: Callable[[], None]) -> None:
    """Run a function in a thread of its own; raise what it has raised."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.no_grad()(work)).result()
