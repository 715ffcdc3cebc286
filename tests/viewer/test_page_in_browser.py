"""The page in a browser: its script runs, finds, shows details, and is fast enough."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cgraph
from cgraph._viewer.lanes import in_lanes, ordered
from cgraph._viewer.nesting import nested
from cgraph._viewer.page import Drawing, page
from lab import SimLab
from viewed import node, step_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here")


def loaded(file: Path, fragment: str = "") -> tuple[dict[str, str], str]:
    """Return what a page's script has noted at its root, and the page as it is then."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"{file.as_uri()}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    [root] = re.findall(r"<html[^>]*>", done.stdout)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', root)), done.stdout


@pytest.fixture
def file(sim: SimLab, tmp_path: Path) -> Path:
    cgraph.view(step_of(sim)).save(tmp_path / "graph.html")
    return tmp_path / "graph.html"


def test_the_script_draws_all_nodes_and_blocks_without_an_error(file: Path) -> None:
    noted, _ = loaded(file)
    assert "error" not in noted
    assert re.fullmatch(r"nodes:10 blocks:\d+", noted["ready"])


@pytest.mark.parametrize(("text", "hits"), [("layers.1", 3), ("RELU", 3), ("nothing", 0)])
def test_a_search_finds_modules_and_operators(file: Path, text: str, hits: int) -> None:
    noted, html = loaded(file, f"search={text}")
    assert (noted["hits"], "error" in noted) == (str(hits), False)
    assert (f"{hits} hit" in html) is True


def test_the_panel_of_a_hidden_node_opens_with_its_module_and_its_neighbours(file: Path) -> None:
    noted, html = loaded(file, "node=5")
    assert (noted["selected"], "error" in noted) == ("5", False)
    [panel] = re.findall(r'<aside id="panel".*?</aside>', html, re.DOTALL)
    assert "Model.layers.1" in panel and "viewed.py:" in panel and "4: " in panel and "6: " in panel


def test_a_block_of_the_memory_tells_its_owner(file: Path) -> None:
    noted, html = loaded(file, "tab=memory&block=1&theme=dark")
    assert (noted["selected"], noted["theme"], "error" in noted) == ("1", "dark", False)
    [panel] = re.findall(r'<aside id="panel".*?</aside>', html, re.DOTALL)
    assert "aten." in panel and "viewed.py:" in panel


def with_script(file: Path, script: str) -> Path:
    """Return a page with a script of a test behind its own, which its policy would forbid."""
    html = re.sub(r"<meta http-equiv[^>]*>", "", file.read_text())
    other = file.with_name("with_script.html")
    other.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    return other


def test_a_click_on_a_box_opens_the_panel(file: Path) -> None:
    click = """
        const box = view.boxes.find((one) => one.kind === 'node');
        const frame = stage.canvas.getBoundingClientRect();
        const clientX = frame.left + stage.x + (box.x + 9) * stage.kx;
        const clientY = frame.top + stage.y + (box.y + 9) * stage.ky;
        stage.canvas.setPointerCapture = () => {};
        for (const type of ['pointerdown', 'pointerup']) {
          stage.canvas.dispatchEvent(new PointerEvent(type, { clientX, clientY, pointerId: 1 }));
        }
        root.dataset.clicked = box.item;
    """
    noted, _ = loaded(with_script(file, click))
    assert noted.get("error") is None
    assert noted["selected"] == noted["clicked"] != ""


def test_a_canvas_of_another_size_is_drawn_at_once(file: Path) -> None:
    resize = """
        stage.redraw = () => {};
        stage.canvas.style.flex = 'none';
        stage.canvas.style.width = '500px';
        stage.resize();
        const { data: pixels } = stage.pen.getImageData(0, 0, stage.canvas.width, 400);
        root.dataset.colours = new Set(new Uint32Array(pixels.buffer)).size;
    """
    noted, _ = loaded(with_script(file, resize))
    assert noted.get("error") is None
    assert int(noted["colours"]) > 10


def test_names_from_outside_are_text_and_no_markup(sim: SimLab, tmp_path: Path) -> None:
    odd = "</script><img src=x onerror=alert(1)>«é»"
    cgraph.view(step_of(sim), title=odd).save(tmp_path / "odd.html")
    noted, html = loaded(tmp_path / "odd.html")
    assert "error" not in noted and "<img" not in html
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;«é»</h1>" in html


def test_five_thousand_nodes_are_laid_out_in_a_second(tmp_path: Path) -> None:
    # Numbers in names would fold all layers.
    words = ["add", "mm", "sum", "cat", "exp", "neg", "sin"]
    nodes = [
        node(f"M.{'abcdefgh'[i // 625]}.h{i // 25}", [i - 1] if i else [], words[i * i % 7])
        for i in range(5000)
    ]
    nodes = ordered(nodes)
    in_lanes(nodes)
    drawing = Drawing(nodes, nested(nodes), "Graph", "node")
    (tmp_path / "large.html").write_text(page("large", drawing, None))
    noted, _ = loaded(tmp_path / "large.html", "node=4321")
    assert (noted["ready"], noted["selected"], "error" in noted) == ("nodes:5000", "4321", False)
    # A clock of the page itself: a budget of a second with room for a busy machine.
    assert int(noted["milliseconds"]) < 3000
