"""The commands, and what each prints."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click
import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

import cgraph
from cgraph import Cause, _driver
from cgraph._text import nearest
from cgraph.errors import ArgumentError, CgraphError

__all__ = ["app"]

_SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}

_HEADINGS = {
    "refused": "A capture refuses a line that …",
    "frozen": "Replays keep what was at the capture, as a line …",
    "eager": "Calls run without a graph, as the call, or what it works on, …",
    "told": "Calls are replays, and a warning says that the function, or a call, …",
}

_place = click.argument("place", metavar="MODULE:FUNCTION")
_args = click.option(
    "--args",
    metavar="NAME",
    help="Its arguments, by their name in the same module: a tuple, one argument, or a function"
    " that returns either.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(
    epilog="Without a GPU: CGRAPH_DRIVER=sim. Exit codes: 0 all is well, 1 not, 2 wrong usage."
)
@click.version_option(cgraph.__version__, message="cgraph %(version)s")
def app() -> None:
    """CUDA graphs for PyTorch: what is here, what a capture refuses, what graphs bring."""


@app.command()
@_json
def doctor(as_json: bool) -> None:
    """Say what was found here, what is missing, and what is known to go wrong."""
    from cgraph._cli.doctor import checks

    found = checks()
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for one in found:
            fix = f"\n[dim]{escape(one.fix)}[/]" if one.fix else ""
            table.add_row(_SIGNS[one.state], escape(one.name), escape(one.found) + fix)
        Console().print(table)
    if any(one.state == "error" for one in found):
        sys.exit(1)


@app.command()
@_place
@_args
@_json
def explain(place: str, args: str | None, as_json: bool) -> None:
    """Run a function once, and list what a capture of it would refuse or freeze.

    The function is module:function, or file.py:function. The exit code is 1 if a capture refuses
    something.
    """
    from cgraph._cli.targets import named

    with _told(), _on():
        target = named(place, args)
        found = cgraph.explain(target.function, *target.args)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        click.echo(f"{target.name}:\n{found}")
    if not found.ok:
        sys.exit(1)


@app.command()
@click.argument("code", required=False)
def why(code: str | None) -> None:
    """Explain a code of a message, as CG-HOST-READ, with an example; all codes without one."""
    console = Console()
    if code is None:
        for severity, heading in _HEADINGS.items():
            table = Table(box=None, padding=(0, 1), show_header=False)
            # Codes are to be typed: none is cut.
            table.add_column(no_wrap=True)
            for one in Cause:
                if one.severity == severity:
                    table.add_row(one.code, one.what)
            console.print(heading, table, "", sep="\n")
        console.print("What to do, with an example: cgraph why CODE")
        return
    try:
        found = Cause.of_code(code)
    except ValueError as error:
        near = nearest(code.upper(), [one.code for one in Cause])
        hint = "" if near is None else f", and the nearest one is {near}"
        raise click.BadParameter(f"{error}{hint}", param_hint="CODE") from None
    console.print(Markdown(found.page))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--patch", is_flag=True, help="Give torch's names of CUDA graphs to cgraph.")
@click.option("--trees", is_flag=True, help="As --patch; mode='reduce-overhead' too, in its trees.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: Path, arguments: tuple[str, ...], patch: bool, trees: bool) -> None:
    """Run a program with its arguments, and report on its graphs when it ends."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    with ExitStack() as patched:
        if patch or trees:
            patched.enter_context(cgraph.patch_torch(trees=trees))
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            for report in (cgraph.report(), cgraph.trees.report(), cgraph.memory()):
                click.echo(f"\n{report}", err=True)


@app.command()
@_place
@_args
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("graph.svg"),
    show_default=True,
    help="The file; its suffix decides: .svg, .html, .dot or .json.",
)
def draw(place: str, args: str | None, out: Path) -> None:
    """Capture a function, module:function or file.py:function, and draw its graph."""
    from cgraph import picture
    from cgraph._cli.targets import named

    if out.suffix not in (".svg", ".html", ".dot", ".json"):
        expected = "expected .svg, .html, .dot or .json"
        raise click.BadParameter(f"{out.name}, {expected}", param_hint="--out")
    with _told(), _on() as device:
        target = named(place, args)
        target()
        graph = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.record_memory(), cgraph.graph(graph, enable_annotations=True):
            # Alive until the end of the capture.
            _result = target()
        if out.suffix == ".svg":
            picture.save(graph, out, title=target.name)
        elif out.suffix == ".html":
            measure = device.type == "cuda"
            cgraph.view(graph, title=target.name, measure=measure).save(out)
        elif out.suffix == ".dot":
            cgraph.export_dot(out)(graph)
        else:
            graph.instantiate()
            out.write_text(json.dumps(cgraph.graph_data(graph), indent=1))
        click.echo(f"{out}: {graph.memory().nodes} nodes")


@app.command()
@click.argument("place", metavar="[MODULE:FUNCTION]", required=False)
@_args
@click.option("--calls", type=click.IntRange(min=1), default=200, help="Calls of a round.")
@_json
def bench(place: str | None, args: str | None, calls: int, as_json: bool) -> None:
    """Measure calls of a function: eagerly, as torch's graph, as cgraph's.

    The function is module:function or file.py:function; by default one of twenty small kernels.
    """
    from cgraph._cli.bench import costs, small_network
    from cgraph._cli.targets import named

    with _told(), _on() as device:
        target = small_network() if place is None else named(place, args)
        found = costs(target, calls)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "simulator: no speed"
    table = Table(title=f"{target.name} ({where})", title_justify="left")
    table.add_column("µs a call")
    table.add_column("host", justify="right")
    table.add_column("with the device", justify="right")
    for one in found:
        table.add_row(one.name, f"{one.host:.1f}", f"{one.whole:.1f}")
    Console().print(table)


@contextmanager
def _told() -> Iterator[None]:
    """Print errors of cgraph's without a traceback; they say what to do."""
    try:
        yield
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    except CgraphError as error:
        _end(f"{type(error).__name__}: {error}")


def _end(text: str) -> NoReturn:
    click.echo(text, err=True)
    sys.exit(1)


@contextmanager
def _on() -> Iterator[torch.device]:
    """Yield the device of tensors, with a driver in force: the simulator where there is no GPU."""
    name = os.environ.get("CGRAPH_DRIVER", "auto")
    if name == "auto" and not torch.cuda.is_available():
        text = "No CUDA GPU here: this runs on cgraph's simulator (no speed is claimed)."
        click.echo(text, err=True)
        name = "sim"
    if name == "sim":
        threads = torch.get_num_threads()
        # The operators are so small that a second thread mostly waits, and for long when busy.
        torch.set_num_threads(1)
        try:
            with cgraph.sim.use():
                yield torch.device("cpu")
        finally:
            torch.set_num_threads(threads)
        return
    driver = _driver.current()
    driver.synchronize()
    yield torch.device("cuda", torch.cuda.current_device())
