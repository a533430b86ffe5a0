"""The pictures of docs/report.md: `python examples/report_pictures.py RUN RUN`, with Chromium and playwright.

Two quickstart runs that differ in one setting will do, of rows few enough that problems come again. After
`rlt fit --config miniature_warmup --output_dir runs/w`:
`rlt fit --config quickstart --model.teacher runs/w/model --data.num_embedded_rows 64 --output_dir runs/a`,
and with `--model.reward.kl_weight 1 --output_dir runs/b`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import sync_playwright

from rlt_lightning.report import report

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
# Name, runs, width and height of the window, theme, and the heading that stands on top.
SHOTS = (
    ("light", 1, (1280, 1400), "light", "What the run did"),
    ("dark", 1, (1280, 900), "dark", "One problem, side by side"),
    ("phone", 1, (390, 844), "light", "All completions"),
    ("overlay", 2, (1280, 1200), "light", "Settings that differ"),
)


def main(runs: list[str]) -> None:
    """Write a report of the first run and one of all, and take their pictures."""
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, number, (width, height), theme, heading in SHOTS:
            path = Path(folder) / f"{number}.html"
            report(runs[:number], output=str(path))
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            page.goto(path.as_uri())
            take(page, heading, PICTURES / f"report-{name}.png")
        browser.close()


def take(page: Any, heading: str, path: Path) -> None:
    """Scroll to a heading, show the figure of the token that surprised most, and write the window."""
    if heading == "All completions":
        page.locator(".row", has_text="with tokens").first.click()
        page.locator(".row[aria-expanded=true]").evaluate("(row) => row.scrollIntoView()")
    else:
        page.get_by_role("heading", name=heading, exact=True).evaluate("(node) => node.scrollIntoView()")
    if heading not in ("What the run did", "Settings that differ"):
        place = ".list .top-tokens button" if heading == "All completions" else ".card .top-tokens button"
        page.locator(place).first.evaluate("(button) => button.click()")
    page.wait_for_timeout(300)
    page.screenshot(path=path)


if __name__ == "__main__":
    main(sys.argv[1:])
