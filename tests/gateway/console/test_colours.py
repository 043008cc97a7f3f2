"""The console's colours: texts stand out from what is behind them in both modes.

The limit is that of WCAG 2.2, level AA, for texts of any size.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import loraplex_services.gateway.console as console

STYLES = (Path(console.__file__).parent / "static/console.css").read_text()
LEAST_CONTRAST = 4.5
TEXTS = {
    "panel": ("ink", "soft", "faint", "accent", "good", "warn", "bad", "one", "two"),
    "page": ("ink", "soft", "faint", "bad"),
    "tint": ("ink", "soft", "faint"),
    "good-tint": ("good",),
    "warn-tint": ("warn",),
    "bad-tint": ("bad",),
    "accent": ("accent-ink",),
}
"""The colours of texts by the colour that is behind them."""


def _colours(selector: str) -> dict[str, str]:
    [block] = re.findall(rf"^{re.escape(selector)} \{{(.*?)\}}", STYLES, re.DOTALL | re.MULTILINE)
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6});", block))


def _luminance(colour: str) -> float:
    """Of `#rgb` or `#rrggbb`, between 0 and 1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'], ids=["light", "dark"])
@pytest.mark.parametrize("behind", TEXTS)
def test_texts_stand_out_from_what_is_behind_them(selector: str, behind: str) -> None:
    colours = _colours(selector)
    for text in TEXTS[behind]:
        dark, light = sorted((_luminance(colours[text]), _luminance(colours[behind])))
        contrast = (light + 0.05) / (dark + 0.05)
        assert contrast >= LEAST_CONTRAST, f"--{text} on --{behind}: {contrast:.2f}"
