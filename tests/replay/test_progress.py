import io

from kvjax.replay import progress
from kvjax.replay.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_redraws(monkeypatch):
    monkeypatch.setattr(progress, "_REDRAW_S", 0)
    stream = Terminal()
    bar = Progress("requests", 1_000, stream)
    bar.show(250, ", 3 running")
    bar.show(1_000)
    first, second = stream.getvalue().split("\r")[1:]
    assert first.startswith("\x1b[K[#######-----------------------] requests: 250 of 1,000 in 0 s")
    assert first.endswith(", 3 running")
    assert second.startswith("\x1b[K[##############################] requests: 1,000 of 1,000")
    assert second.endswith("\n")


def test_a_file_gets_a_line_now_and_then():
    stream = io.StringIO()
    bar = Progress("requests", 3, stream)
    for done in (1, 2, 3):
        bar.show(done)
    assert stream.getvalue() == "requests: 3 of 3 in 0 s\n"


def test_nothing_to_do_is_done():
    stream = Terminal()
    Progress("tokens", 0, stream).show(0)
    assert stream.getvalue().endswith("tokens: 0 of 0 in 0 s\n")
