"""Write the table of docs/reference/settings.md anew from services/common/settings/env.py.

python scripts/write_settings.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "settings.md"
BEGIN = "<!-- settings: written from services/common/settings/env.py -->\n"
END = "<!-- end of settings -->"


def main() -> None:
    """Replace what stands between the two marks of the page."""
    sys.path.insert(0, str(ROOT))
    from loraplex_services.common.settings.variables import settings_markdown

    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{settings_markdown()}\n{END}{after}")


if __name__ == "__main__":
    main()
