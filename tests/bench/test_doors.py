"""What can't be is refused at a command's door: in a line, before anything is measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import compare, contact_sheet, limit, mixing, overhead, replay


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (replay.main, ["--url", "nonsense"], "'nonsense' is no server's address"),
        (replay.main, ["--url", "http://"], "is no server's address"),
        (replay.main, ["--url", "ftp://127.0.0.1"], "is no server's address"),
        (replay.main, ["--url", "http://127.0.0.1:99999"], "is no server's address"),
        (replay.main, ["--url", "http://127.0.0.1/v1"], "is no server's address"),
        (replay.main, ["--metrics", "9102"], "'9102' is no page's address"),
        (replay.main, ["-n", "0"], "at least 1"),
        (replay.main, ["--arrivals", "gentd26", "-n", "2"], "-n is for --arrivals closed, poisson"),
        (replay.main, ["--arrivals", "trace", "-n", "2"], "-n is for --arrivals closed, poisson"),
        (replay.main, ["--rate", "2"], "closed has no use for it"),
        (replay.main, ["--skip", "2"], "closed has no use for it"),
        (replay.main, ["--arrivals", "poisson", "--trace", __file__], "poisson has no use for it"),
        (replay.main, ["--arrivals", "trace"], "needs the file"),
        (limit.main, ["--batches", "0"], "--batches: '0' can't be read: it must be at least 1"),
        (limit.main, ["--batches", "4,-1"], "'-1' can't be read"),
        (limit.main, ["--checkpoint", "nonsense"], "no folder nonsense"),
        (limit.main, ["--device", "nonsense"], "'nonsense' is no device"),
        (limit.main, ["--dtype", "nonsense"], "'nonsense' is no dtype"),
        (limit.main, ["--shape", "7x7/2"], "divisible by"),
        (mixing.main, ["nonsense"], "there is no load 'nonsense'"),
        (mixing.main, ["--guidance", "4,much"], "--guidance: 'much' can't be read"),
        (mixing.main, ["--guidance", "1"], "--guidance 1 turns guidance off"),
        (mixing.main, ["sizes"], "the requests of sizes would not differ"),
        (mixing.main, ["--shapes", "7x7/2"], "divisible by"),
        (contact_sheet.main, ["sheet.png", "--url", "nonsense"], "'nonsense' is no server's address"),
    ],
)
def test_an_option_that_can_t_be(main: Callable[..., None], arguments: list[str], words: str) -> None:
    refused(main, arguments, words)


@pytest.mark.parametrize("main", [compare.main, limit.main, mixing.main, overhead.main, replay.main])
def test_a_file_that_can_t_be_written(main: Callable[..., None], tmp_path: Path) -> None:
    refused(main, ["--json", f"{tmp_path}/none/figures.json"], "there is no folder")
    refused(main, ["--json", str(tmp_path)], "is a directory")


def refused(main: Callable[..., None], arguments: list[str], words: str) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output
