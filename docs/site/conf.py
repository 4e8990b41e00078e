"""Sphinx: the committed notebooks as a site. Nothing is executed; `ci/site_pages.py` lays out the pages."""

import re

project, author = "drivelit", "drivelit contributors"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
extensions += ["autoapi.extension"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
napoleon_google_docstring = True

# The package is read and not imported: a page of the API needs no torch.
autoapi_dirs = ["package/drivelit"]
autoapi_root = "api"
autoapi_ignore = ["*/_modidx.py"]
autoapi_options = ["members", "show-module-summary"]
autoapi_add_toctree_entry = False
autoapi_member_order = "bysource"
autoapi_keep_files = False

html_theme = "sphinx_book_theme"
html_title = "drivelit"
html_static_path = ["static"]
html_css_files = ["drivelit.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = dict(
    repository_url="https://github.com/drivelit/drivelit",
    repository_branch="main",
    use_repository_button=True,
    use_issues_button=True,
    show_navbar_depth=1,
    show_toc_level=2,
    navigation_with_keys=False,
    collapse_navigation=True,
)
exclude_patterns = ["package"]
# Names that one line binds together (X, Y = 0, 1) are not followed, and a word that several classes have is no link.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]


def _plain(app, what, name, thing, options, lines):
    "Docstrings are plain text: a star, a bar or an underscore at a word's end is no mark-up outside of `code`."
    for i, line in enumerate(lines):
        parts = re.split(r"(``?[^`]*``?)", line)
        parts[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
        parts[1::2] = ["``" + part.strip("`") + "``" for part in parts[1::2]]
        lines[i] = "".join(parts)


def setup(app):
    app.connect("autodoc-process-docstring", _plain, priority=400)  # before napoleon adds mark-up of its own
