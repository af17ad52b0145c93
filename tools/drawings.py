"""Make the PNG of each drawing of the lessons from its SVG, with two dots for a point, in Chromium."""

import shutil

from playwright.sync_api import sync_playwright

from speedkit.lessons.pictures import DRAWINGS, few_colours


def main() -> None:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(device_scale_factor=2)
        for path in sorted(DRAWINGS.glob("*.svg")):
            page.set_content(path.read_text(encoding="utf-8"))
            drawn = page.locator("svg").screenshot(omit_background=True)
            path.with_suffix(".png").write_bytes(few_colours(drawn))


if __name__ == "__main__":
    main()
