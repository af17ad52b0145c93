"""The site is built without a network and without a warning; it has every lesson and public name, and fits a window."""

import pytest
from processes import ROOT, python

import speedkit

WIDER = "element => element.scrollWidth > element.clientWidth"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("myst_nb", reason="make setup-docs installs it")
    folder = tmp_path_factory.mktemp("site")
    words = ("--fail-on-warning", "--keep-going", "--quiet", "-c", "docs", ".", folder)
    done = python("-m", "sphinx", *words, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_lesson_and_public_name_has_its_place_and_is_found_by_the_search(site):
    lessons = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.stem for path in (site / "notebooks").glob("*.html")} == lessons
    reference = (site / "docs" / "api.html").read_text()
    assert [name for name in speedkit.__all__ if f'id="speedkit.{name}"' not in reference] == []
    assert all(f'id="speedkit.Plan.{field}"' in reference for field in vars(speedkit.Plan()))
    assert "find_micro_batch" in (site / "searchindex.js").read_text()


@pytest.mark.parametrize("width", [420, 900, 1400])
def test_no_page_and_no_code_is_wider_than_its_window(site, browser, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    wide = []
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        if page.evaluate(f"[document.documentElement, ...document.querySelectorAll('.highlight pre')].some({WIDER})"):
            wide.append(path.name)
    page.close()
    assert wide == []
