"""Settings of the documentation site (Sphinx): `make docs` writes it to docs/_build/html, without a network."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

project = "prime-rl"
author = "The prime-rl authors"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "prime-rl"
html_static_path: list[str] = []
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A value such as 1e-5 in a heading is an anchor only once; the pages of keys repeat section names.
suppress_warnings = ["myst.header", "toc.not_included"]


def setup(app: Any) -> None:
    """Write the reference pages before Sphinx lists the sources."""
    from reference import write_pages

    app.connect("config-inited", lambda _app, _config: write_pages(HERE / "generated"))
