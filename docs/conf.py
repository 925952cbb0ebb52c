"""The documentation site: `make docs` builds it from the Markdown in this folder, and fails on any broken link."""

project = "forge"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "forge"
html_static_path: list[str] = []
source_suffix = {".md": "markdown"}
root_doc = "index"
# GitHub's rule for the anchors of headings, so that a link works on both.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True
# Fragments of TOML and console sessions need not parse as a whole.
suppress_warnings = ["misc.highlighting_failure"]
