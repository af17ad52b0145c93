"""The drawings of the lessons: each SVG says what it finds, its PNG is of it, and lessons show each one."""

import io
import re
import types
from xml.etree import ElementTree

import ipywidgets
import pytest
from PIL import Image
from processes import ROOT

from speedkit.errors import UsageError
from speedkit.lessons import pictures, pictures_measure
from speedkit.lessons.pictures import DRAWINGS


def test_each_drawing_says_what_it_finds_and_has_its_png_and_its_lesson():
    shown = set()
    for lesson in (ROOT / "notebooks").glob("*.ipynb"):
        shown |= set(re.findall(r'pictures\.drawing\(\\"(\w+)\\"\)', lesson.read_text()))
    assert shown == {path.stem for path in DRAWINGS.glob("*.svg")} == {path.stem for path in DRAWINGS.glob("*.png")}
    for path in DRAWINGS.glob("*.svg"):
        svg = ElementTree.parse(path).getroot()
        assert svg.findtext("{*}title") and svg.findtext("{*}desc"), path
        _, _, width, height = map(int, svg.get("viewBox").split())
        png = path.with_suffix(".png")
        assert Image.open(png).size == (2 * width, 2 * height) and png.stat().st_size < 40_000, png


def test_a_drawing_is_shown_at_half_its_pixels_with_its_words_and_an_unknown_name_is_one_sentence(monkeypatch):
    shown = []
    monkeypatch.setattr(pictures.display, "display", shown.append)
    pictures.drawing("streams")
    data, about = shown[0]._repr_png_()
    width, height = Image.open(DRAWINGS / "streams.png").size
    assert data and about["alt"] == "Three batches: each waits for its copy, or finds it made"
    assert (2 * about["width"], 2 * about["height"]) == (width, height)
    with pytest.raises(UsageError, match=r"no drawing is called 'stream'; there are .*streams"):
        pictures.drawing("stream")


def test_a_figure_is_shown_on_a_transparent_ground(monkeypatch):
    shown = []
    monkeypatch.setattr(pictures.display, "display", shown.append)
    row = {"name": "twice", "ratio": 2.0, "low": 1.9, "high": 2.1}
    pictures.show(pictures.ratios([row], title="Twice as fast"))
    ground = Image.open(io.BytesIO(shown[0].data)).convert("RGBA").getchannel("A")
    assert ground.getextrema() == (0, 255) and shown[0].alt == "Twice as fast"


def test_a_moved_slider_draws_its_picture_anew_in_its_place(monkeypatch):
    shown = []
    anew = []
    place = types.SimpleNamespace(update=anew.append)

    def display(*objects, display_id=False):
        shown.extend(objects)
        return place if display_id else None

    def draw(launch_us, reads):
        launches = [(0.0, launch_us)]
        return pictures_measure.queue(launches, [], [], title=f"{launch_us:g} and {reads:g}")

    monkeypatch.setattr(pictures.display, "display", display)
    pictures.with_sliders(ipywidgets.FloatLogSlider, draw, launch_us=20.0, reads=0.5)
    launch, reads, picture = shown
    assert (launch.description, picture.alt) == ("launch us", "20 and 0.5")
    launch.value = 200.0
    reads.value = 0.01  # its slider ends at a tenth of where it began
    assert [each.alt for each in anew] == ["200 and 0.5", "200 and 0.05"]
