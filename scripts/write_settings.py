"""Rewrite the table of docs/reference/settings.md from services/common/settings/env.py.

python scripts/write_settings.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from loraplex_services.common.settings import env, switches
from loraplex_services.common.settings.setting import Setting
from loraplex_services.common.settings.variables import shown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "settings.md"
BEGIN = "<!-- settings: written from services/common/settings/env.py -->\n"
END = "<!-- end of settings -->"
SECTIONS = {
    env.REGISTRY_ADDRESS.name: "Addresses and credentials of clients",
    env.STATE_DIR.name: "Every server",
    env.AUTH.name: "Who may call",
    env.REGISTRY_LISTEN.name: "Registry: where adapters are stored",
    env.GATEWAY_LISTEN.name: "Gateway: which requests are accepted",
    env.WORKER_LISTEN.name: "Worker: the base and how it is computed",
    env.KV_MEMORY.name: "Worker: memory",
    env.MAX_NUM_SEQS.name: "Worker: what a step holds",
}
"""Headings of the page by their first variables."""


def table() -> str:
    """The tables of the page, which a test compares with these."""
    lines = []
    for setting in env.ALL_SETTINGS:
        if title := SECTIONS.get(setting.name):
            lines += ["", f"### {title}", "", *_header("variable")]
        name = f"`{setting.name}`" + (" (or `_FILE`)" if setting.secret else "")
        lines.append(_row(name, setting))
    lines += ["", "### Switches of LORAPLEX_DEBUG", "", *_header("switch")]
    lines += [_row(f"`{switch.name}`", switch) for switch in switches.ALL_SWITCHES]
    return "\n".join(lines[1:])


def _header(first: str) -> list[str]:
    return [f"| {first} | default | read by | meaning |", "|---|---|---|---|"]


def _row(name: str, setting: Setting[object]) -> str:
    default = shown(setting.default)
    return f"| {name} | {default and f'`{default}`'} | {setting.readers} | {setting.doc} |"


def main() -> None:
    """Replace the text between the two marks of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
