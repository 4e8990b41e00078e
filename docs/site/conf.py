"""Sphinx: the committed notebooks as a site. Nothing is executed; `ci/site_pages.py` lays out the pages."""

import re

from autoapi._objects import PythonObject

project, author = "drivelit", "drivelit contributors"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
extensions += ["autoapi.extension"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the imports", "Hide the imports"
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
html_baseurl = "https://drivelit.github.io/drivelit/"
html_logo = html_favicon = "static/logo.svg"
html_static_path = ["static"]
html_css_files = ["drivelit.css"]
templates_path = ["templates"]
html_copy_source = True  # a page of text can be downloaded; of a notebook its copy
html_show_sourcelink = False
html_sidebars = {"**": ["navbar-logo.html", "sbt-sidebar-nav.html"]}  # the one search box is in the header
html_theme_options = dict(
    logo=dict(text="drivelit"),
    repository_url="https://github.com/drivelit/drivelit",
    repository_branch="colab",  # the notebooks behind a cell that installs, by `ci/site_pages.py`
    launch_buttons=dict(colab_url="https://colab.research.google.com"),
    use_repository_button=True,
    use_issues_button=True,
    use_download_button=True,
    show_navbar_depth=1,
    show_toc_level=2,
    navigation_with_keys=False,
    collapse_navigation=True,
)
# `ci/site.sh` puts both beside the pages: a reader's browser asks nobody else for them.
mathjax_path = "mathjax/tex-mml-chtml.js"
mermaid_height = "auto"
mermaid_use_local = "mermaid/mermaid.esm.min.mjs"
exclude_patterns = ["package", "_colab"]
# Names that one line binds together (X, Y = 0, 1) are not followed, and a word that several classes have is no link.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]


def _plain(app, what, name, thing, options, lines):
    "Docstrings are plain text: a star, a bar or an underscore at a word's end is no mark-up outside of `code`."
    for i, line in enumerate(lines):
        parts = re.split(r"(``?[^`]*``?)", line)
        parts[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
        parts[1::2] = ["``" + part.strip("`") + "``" for part in parts[1::2]]
        lines[i] = "".join(parts)


def _summary(thing):
    "The first paragraph of a docstring; autoapi takes its first line, which may end in the middle of a sentence."
    return " ".join(thing.docstring.strip().partition("\n\n")[0].split())


PythonObject.summary = property(_summary)


def setup(app):
    app.connect("autodoc-process-docstring", _plain, priority=400)  # before napoleon adds mark-up of its own
