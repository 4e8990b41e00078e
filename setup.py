"""What the wheel has of the repository: the README with links that lead there, and a copy of the file of profiles."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
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


def packaged_settings(text):
    """The package's copy of settings.ini.

    Args:
        text: of the file at the top, which a clone reads

    Returns:
        str: the same behind a line that says where it is from
    """
    return f"# Made from the settings.ini at the top of the repository: edit that one, which a clone reads.\n{text}"


def write_settings():
    "Make drivelit/settings.ini, if it is not what settings.ini says."
    top, copy = HERE / "settings.ini", HERE / "drivelit" / "settings.ini"
    text = packaged_settings(top.read_text(encoding="utf-8"))
    if not copy.exists() or copy.read_text(encoding="utf-8") != text:
        copy.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_settings()
    page = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute_links(page), long_description_content_type="text/markdown")
