"""The pages of the site from the repository: python ci/site_pages.py FOLDER lays out what Sphinx reads.

The notebooks as they are committed, without nbdev's directives; the texts of `docs/`; the README as the first page.
A link to a file that is no page leads to the repository.
"""

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/drivelit/drivelit"
INDEX = Path("nbs/index.ipynb")
TEXTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data_cards/README.md"]


def pages(root=ROOT):
    "Every file of the repository that is a page of the site, as paths from the root."
    notebooks = [root / INDEX, *(p for p in sorted(root.glob("nbs/*/*.ipynb")) if not p.name.startswith("_"))]
    texts = [root / name for name in TEXTS] + sorted(root.glob("docs/*.md")) + sorted(root.glob("data_cards/*.md"))
    return [p.relative_to(root) for p in dict.fromkeys(notebooks + texts)]


def linked(text, page, known, root=ROOT):
    "`text` of the file `page` with every relative link to what is no page turned into an address of the repository."

    def one(match):
        before, target, after = match.groups()
        if re.match(r"[a-z]+:", target):
            return match.group(0)
        path, mark, anchor = target.partition("#")
        anchor = mark + re.sub(r"[^\w-]", "", anchor.lower())  # Jupyter's name of a heading, as Sphinx spells it
        if not path:
            return before + anchor + after
        place = (root / page.parent / path).resolve()
        if place == root / "README.md":  # the site's first page
            path = path.removesuffix("README.md") + "index.md"
        inside = place.is_relative_to(root) and place.exists()
        if inside and (place.relative_to(root) in known or place.suffix in (".png", ".gif", ".webp")):
            return before + path + anchor + after
        kind = "tree" if place.is_dir() else "blob"
        place = place.relative_to(root) if inside else Path(path)
        return f"{before}{REPOSITORY}/{kind}/main/{place.as_posix()}{anchor}{after}"

    return re.sub(r"(\]\()([^)\s]+)(\))", one, text)


def notebook(path, page, known):
    "A notebook for readers: directives, hidden cells and states of widgets are left out."
    nb = json.loads(path.read_text(encoding="utf-8"))
    kept = []
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Jupyter sets a formula in mid-paragraph, Sphinx one that is a paragraph of its own
            source = re.sub(r"\s*\$\$(.+?)\$\$[ \t]*\n?", r"\n\n$$\1$$\n\n", linked(source, page, known), flags=re.S)
        elif re.search(r"^#\|\s*hide\s*$", source, re.M):
            continue
        else:
            source = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")
            if not source and not cell.get("outputs"):
                continue
        kept.append(cell | {"source": source})
    nb["cells"] = kept
    nb["metadata"] = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return json.dumps(nb, ensure_ascii=False)


def captions():
    "Rooms in reading order, each with what it is about, from the map of the notebooks."
    cells = json.loads((ROOT / INDEX).read_text("utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells)
    found = re.findall(r"^\| \*\*(\w+)\*\* \| \*(.+?)\*", text, re.M)
    return [(folder, caption[0].upper() + caption[1:]) for folder, caption in found]


def contents():
    "The tree of contents, room by room, in reading order."
    lines = ["", "```{toctree}", ":hidden:", "", str(INDEX.with_suffix("")), "```"]
    for folder, caption in captions():
        inside = sorted(p.stem for p in (ROOT / "nbs" / folder).glob("*.ipynb"))
        lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", ""]
        lines += [f"nbs/{folder}/{name}" for name in inside] + ["```"]
    texts = [str(p.with_suffix("")) for p in pages() if p.suffix == ".md" and p != Path("README.md")]
    lines += ["", "```{toctree}", ":hidden:", ":caption: Texts", "", "api/drivelit/index", *texts, "```", ""]
    return "\n".join(lines)


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    known = set(pages())
    for page in known:
        out = folder / page
        out.parent.mkdir(parents=True, exist_ok=True)
        path = ROOT / page
        text = notebook(path, page, known) if page.suffix == ".ipynb" else linked(path.read_text("utf-8"), page, known)
        out.write_text(text, encoding="utf-8")
    (folder / "README.md").rename(folder / "index.md")
    with open(folder / "index.md", "a", encoding="utf-8") as index:
        index.write(contents())
    shutil.copytree(ROOT / "assets", folder / "assets")
    abouts = {name.split("_", 1)[1]: caption for name, caption in captions()}
    for module in (ROOT / "drivelit").rglob("*.py"):
        out = folder / "package" / module.relative_to(ROOT)
        out.parent.mkdir(parents=True, exist_ok=True)
        text = module.read_text(encoding="utf-8")
        if module.name == "__init__.py" and not text.lstrip().startswith('"""'):  # a package without a word has no page
            text = f'"""{abouts.get(module.parent.name, "The package.")}"""\n' + text
        out.write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "site", folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
