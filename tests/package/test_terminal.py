"""What is printed on a terminal."""

from __future__ import annotations

import io

import pytest

from cgraph._text import print_fitted, table


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 120])
def test_what_is_shown_on_a_terminal_fits_it_and_elsewhere_is_whole(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["a key of a function with a long name", "captured", "1,000"]] * 2
    text = table(["key", "state", "replays"], rows) + "\n" + "A sentence of many words. " * 5
    monkeypatch.setenv("COLUMNS", str(width))
    screen, pipe = Terminal(), io.StringIO()
    print_fitted(text, screen)
    print_fitted(text, pipe)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.endswith("…") for line in lines) == (4 if width == 40 else 0)
    assert "".join(lines[4:]).replace(" ", "") == text.splitlines()[-1].replace(" ", "")
    assert pipe.getvalue() == text + "\n"
