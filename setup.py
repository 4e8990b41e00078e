"""The page of the wheel: README.md with links that lead to the repository, for PyPI shows no other file of it."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/drivelit/drivelit"
RAW = "https://raw.githubusercontent.com/drivelit/drivelit"


def absolute_links(text, branch="main"):
    """Links from the repository's root, as links to the repository.

    Args:
        text: Markdown
        branch: where the files are

    Returns:
        str: pictures lead to the file itself, other links to its page; addresses and anchors stay
    """
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)([^)]+)\)", rf"\1{RAW}/{branch}/\2)", text)
    return re.sub(r"(\]\()(?!https?:|#)([^)]+)\)", rf"\1{REPOSITORY}/blob/{branch}/\2)", text)


if __name__ == "__main__":
    page = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute_links(page), long_description_content_type="text/markdown")
