"""What the demo model learns from: fetched as pinned, in other colours, at every size, and nothing that is held out."""

import io
import json
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
from transformers import CLIPTokenizer

from services.demo.training.captions import COLOUR_WORDS, HELD_OUT, caption, noun
from services.demo.training.colours import COLOURS, main_colour, recolour
from services.demo.training.latents import SIZES
from services.demo.training.pictures import CHOSEN, Thing, load_things, name_of, on_white, render
from services.demo.training.sources import Package, fetch
from services.demo.training.tokenizer import MAX_LENGTH, new_tokenizer
from services.demo.training.views import PictureBook
from tests.demo.packages import THINGS, write_packages


@pytest.fixture
def things(tmp_path: Path) -> list[Thing]:
    write_packages(tmp_path)
    return load_things(tmp_path)


def put_npm_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def npm_that_packs(folder: Path, content: bytes) -> str:
    archive = folder / "archive.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("package/icons.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    # `npm pack --json --pack-destination FOLDER NAME`
    return f"cp {archive} \"$4/a-b-1.0.0.tgz\"; echo '{json.dumps([{'filename': 'a-b-1.0.0.tgz'}])}'"


def test_a_package_that_is_not_the_pinned_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_npm_on_the_path(tmp_path, monkeypatch, npm_that_packs(tmp_path, b"{}"))
    with pytest.raises(RuntimeError, match=r"is not @a/b@1\.0\.0 as pinned: its hash is sha512-"):
        fetch(Package("@a/b", "1.0.0", "sha512-other"), tmp_path / "cache")
    assert not (tmp_path / "cache" / "a-b-1.0.0").exists()


def test_a_package_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_npm_on_the_path(tmp_path, monkeypatch, npm_that_packs(tmp_path, b"{}"))
    with pytest.raises(RuntimeError) as raised:
        fetch(Package("@a/b", "1.0.0", "sha512-other"), tmp_path / "cache")
    package = Package("@a/b", "1.0.0", str(raised.value).rpartition(" ")[2])
    folder = fetch(package, tmp_path / "cache")
    assert (folder / "icons.json").read_text() == "{}"
    put_npm_on_the_path(tmp_path, monkeypatch, "exit 1")
    assert fetch(package, tmp_path / "cache") == folder


def test_npm_failing_or_missing_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_npm_on_the_path(tmp_path, monkeypatch, "echo E404 >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"npm could not fetch a@1: E404"):
        fetch(Package("a", "1", ""), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="npm fetches a, and it is not installed"):
        fetch(Package("a", "1", ""), tmp_path)


def test_held_out_combinations_are_of_chosen_things_and_known_colours() -> None:
    names = {name_of(label) for label in CHOSEN}
    for colour, name in HELD_OUT:
        assert colour in COLOURS
        assert name in names


def test_nothing_held_out_is_drawn_or_said(things: list[Thing]) -> None:
    held_out = frozenset({("blue", "red apple"), ("purple", "frog")})
    book, random = PictureBook(things, held_out), np.random.default_rng(0)
    said, drawn = set(), set()
    for _ in range(4000):
        view = book.view(random, 64, 64)
        drawn.add((view.colour, things[view.thing].name))
        said.add(caption(things[view.thing], view.colour, random))
    assert not held_out & drawn
    assert ("green", "red apple") in drawn
    assert any("green apple" in text for text in said)
    assert not [text for text in said if "blue apple" in text or "purple frog" in text]


def test_a_grey_thing_is_never_given_a_colour(things: list[Thing]) -> None:
    book = PictureBook(things, frozenset())
    colours = {thing.name: colours for thing, colours in zip(things, book.colours, strict=True)}
    assert colours["elephant"] == ()
    assert colours["frog"] == tuple(COLOURS)


@pytest.mark.parametrize("word", COLOURS)
def test_recolouring_moves_the_main_colour_and_leaves_the_rest(word: str) -> None:
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 128 128"><rect width="128" height="90" fill="#e02818"/>'
        '<rect y="90" width="128" height="38" fill="#fff"/></svg>'
    )
    picture = render(svg, 64)
    main = main_colour(picture)
    assert main is not None
    changed = recolour(picture, main, word)
    target, found = COLOURS[word], main_colour(changed)
    if target.saturation:
        assert found is not None
        assert abs((found.hue - target.hue + 0.5) % 1 - 0.5) < 0.035
        assert found.value == pytest.approx(target.value, abs=0.05)
    else:
        assert found is None
        assert changed[10, 10, 0] / 255 == pytest.approx(target.value, abs=0.05)
    assert (changed[50:] == picture[50:]).all(), "white stays white"
    assert (changed[..., 3] == picture[..., 3]).all()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.width}x{size.height}")
def test_views_have_the_size_that_was_asked_for_and_lie_within(size, things: list[Thing]) -> None:
    book, random = PictureBook(things, frozenset()), np.random.default_rng(0)
    for _ in range(20):
        picture = book.draw(book.view(random, size.width, size.height))
        assert picture.shape == (size.height, size.width, 3)
        assert (picture < 250).any(), "there is something on it"


def test_sizes_share_all_batches_and_are_ones_that_the_model_can_take() -> None:
    assert sum(size.share for size in SIZES) == pytest.approx(1)
    for size in SIZES:
        assert size.width % 8 == size.height % 8 == 0  # a quarter by the autoencoder, a half by the patches


def test_the_tokenizer_is_the_same_each_time_and_survives_saving(tmp_path: Path, things: list[Thing]) -> None:
    words = [word for thing in things for word in thing.name.split()]
    tokenizer, again = new_tokenizer(words), new_tokenizer(words)
    assert tokenizer.get_vocab() == again.get_vocab()
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = CLIPTokenizer.from_pretrained(tmp_path / "saved")
    text = "A Red  APPLE, café 3"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.model_max_length == MAX_LENGTH
    assert tokenizer.tokenize("Red frog") == ["red</w>", "frog</w>"]


def test_captions_name_things_by_all_their_names(things: list[Thing]) -> None:
    random = np.random.default_rng(0)
    apple = next(thing for thing in things if thing.name == "red apple")
    said = {caption(apple, None, random) for _ in range(300)}
    assert {"red apple", "apple", "a red apple", "an emoji of a red apple"} <= said
    assert any("fruit" in text for text in said)
    coloured = {caption(apple, "blue", random) for _ in range(100)}
    assert {"blue apple", "a blue apple"} <= coloured
    assert not [text for text in coloured if "red" in text.split()]


def test_a_noun_is_a_name_without_its_colour() -> None:
    names = ("red apple", "light blue heart", "frog", "light bulb", "police car light", "red")
    assert [noun(name) for name in names] == ["apple", "heart", "frog", "light bulb", "police car light", "red"]
    assert set(COLOURS) <= COLOUR_WORDS


def test_pictures_stand_on_white(things: list[Thing]) -> None:
    assert [thing.name for thing in things] == list(THINGS)
    picture = on_white(render(things[0].svg, 64), 96, 64, 16, 0)
    assert picture.shape == (64, 96, 3)
    assert (picture[:, :16] == 255).all()
    assert (picture[34, 48] == (0xE0, 0x30, 0x20)).all()
