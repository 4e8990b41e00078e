"""The pages of the site from the repository: python ci/site_pages.py FOLDER lays out what Sphinx reads.

The notebooks as they are committed, without nbdev's directives; the texts of `docs/`; the README as the first page.
A link to a file that is no page leads to the repository.
"""

import ast
import json
import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/drivelit/drivelit"
INDEX = Path("nbs/index.ipynb")
GROUPS = {  # of the navigation: what each is for, its sections (None: those of the systems), and its other pages
    "Start": ("The map of all notebooks, and how long runs are started.", (), ["nbs/index", "docs/RUNS"]),
    "Five systems": ("Each system has an overview, its parts, and a run with its tables.", None, []),
    "Methods": (
        "The model, how it plays, and how it learns.",
        ("20_policy", "30_rollout", "40_training", "45_base"),
        [],
    ),
    "Scenes and metrics": (
        "What a driving moment is, and how good a plan is.",
        ("00_scene", "02_town", "04_sources", "06_io", "10_metrics", "35_data"),
        [],
    ),
    "Runs": ("Profiles, stages, commands and the cluster; all systems on the road.", ("42_runs", "60_closed_loop"), []),
    "Bridges": ("Official tools, your own planner, other trainers.", ("65_bridges", "80_testing"), []),
    "Reference": ("Every public name, and the longer texts.", (), ["api/drivelit/index"]),
}
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
            if imports_only(source):
                cell = cell | {"metadata": {"tags": ["hide-cell"]}}
        kept.append(cell | {"source": source})
    nb["cells"] = kept
    nb["metadata"] = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return json.dumps(nb, ensure_ascii=False)


def imports_only(source):
    "Whether a cell of code has imports and nothing else: a reader unfolds it."
    try:
        return all(isinstance(line, ast.Import | ast.ImportFrom) for line in ast.parse(source).body)
    except SyntaxError:  # a magic
        return False


SETUP = """# What this page needs and this machine lacks is installed; what is there stays.
from importlib.metadata import PackageNotFoundError, version
from packaging.requirements import Requirement


def there(need):
    "Whether a package is installed in a version that will do."
    try:
        return Requirement(need).specifier.contains(version(Requirement(need).name), prereleases=True)
    except PackageNotFoundError:
        return False


NEEDS = {needs}
if lacks := [need for need in NEEDS if not there(need)]:
    import subprocess, sys
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *lacks], check=True)
"""


def for_colab(path):
    "A committed notebook, behind a cell that installs what it lacks where it is opened."
    nb = json.loads((ROOT / path).read_text(encoding="utf-8"))
    source = SETUP.replace("{needs}", json.dumps(needs(nb), indent=4))
    cell = dict(cell_type="code", id="colab-setup", metadata={}, execution_count=None, outputs=[])
    nb["cells"].insert(1, cell | {"source": source.splitlines(True)})
    return json.dumps(nb, ensure_ascii=False, indent=1)


def needs(nb):
    "The packages that a notebook imports itself, or through the package, as pip reads them."
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    found = imported("\n".join("".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "code"))
    out = [f"drivelit @ git+{REPOSITORY}"] if "drivelit" in found else []
    out += extras["train"] if found & {"torch", "transformers", "trl", "peft", "accelerate", "datasets"} else []
    out += [need for name in sorted(found) if name[0] == "[" for need in extras.get(name.strip("[]"), ())]
    known = {re.match(r"[\w-]+", need)[0]: need for some in extras.values() for need in some}
    names = {n.replace("_", "-") for n in found} - {"drivelit"}
    return list(dict.fromkeys([*out, *(known[n] for n in sorted(names) if n in known)]))


def imported(source):
    "The packages that a notebook imports at its head, those of its modules, and what these open when it is used."
    found, seen, waiting = used_later(source), set(), [(source, "")]
    while waiting:
        code, package = waiting.pop()
        for name in heads(code, package):
            file = ROOT / (name.replace(".", "/") + ".py")
            if name in seen or not (file.is_file() or "." not in name):
                continue
            seen.add(name)
            found.add(name.partition(".")[0])
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                waiting.append((text, name.rpartition(".")[0]))
                if not package:  # its own module: what waits for its first use is used here
                    found |= used_later(text)
    return found


def used_later(source):
    "The extras of the packages that some code imports at their first use."
    return {f"[{name}]" for name in re.findall(r"\bExtra\([^)]*?\"(\w+)\"\)", source)}


@cache
def heads(source, package):
    "The modules that some code imports at its head, also `y` of `from x import y`, as they are named from outside."
    found = []
    for node in ast.parse(re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.M)).body:
        if isinstance(node, ast.Import):
            found += [name for a in node.names for name in (a.name, a.name.partition(".")[0])]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*up, *filter(None, [node.module])])
            found += [base.partition(".")[0], base, *(f"{base}.{a.name}" for a in node.names)]
    return found


def captions():
    "Sections in reading order, each with what it is about, from the map of the notebooks."
    cells = json.loads((ROOT / INDEX).read_text("utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells)
    found = re.findall(r"^### (\d\w+): (.+)", text, re.M)
    return {folder: caption[0].upper() + caption[1:] for folder, caption in found}


def group_pages():
    "The pages of the navigation by their names: of each group with its sections, of each section with its notebooks."
    about, texts = captions(), [str(p.with_suffix("")) for p in pages() if p.suffix == ".md" and p != Path("README.md")]
    placed, made = {page for _, _, more in GROUPS.values() for page in more}, {}
    for group, (line, sections, more) in GROUPS.items():
        sections = [r for r in about if r.startswith("5")] if sections is None else sections
        for section in sections:
            inside = {f"/nbs/{section}/{p.stem}": summary(p) for p in sorted((ROOT / "nbs" / section).glob("*.ipynb"))}
            lines = "\n".join(f"- {{doc}}`{name}`: {line}" for name, line in inside.items())
            made[f"sections/{section}"] = page_of(about[section], lines, inside, hidden=True)
        more = more + [name for name in texts if name not in placed] if group == "Reference" else more
        made[group.lower().replace(" ", "_")] = page_of(
            group, line, [*(f"sections/{section}" for section in sections), *more]
        )
    return made


def summary(path):
    "The line below a notebook's title."
    first = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])
    return next(line.removeprefix("> ") for line in first.splitlines() if line.startswith("> "))


def page_of(title, text, names, hidden=False):
    "A page that lists others; hidden: the text does, and the navigation alone has the list."
    how = ":hidden:" if hidden else ":maxdepth: 2"
    return "\n".join([f"# {title}", "", text, "", "```{toctree}", how, "", *names, "```", ""])


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
    (folder / "sections").mkdir()
    for name, page in group_pages().items():
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
    groups = [group.lower().replace(" ", "_") for group in GROUPS]
    with open(folder / "index.md", "a", encoding="utf-8") as index:
        index.write("\n".join(["", "```{toctree}", ":hidden:", "", *groups, "```", ""]))
    (folder / "_colab").mkdir()
    for path in sorted(p for p in known if p.suffix == ".ipynb"):
        out = folder / "_colab" / path
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(for_colab(path), encoding="utf-8")
    shutil.copytree(ROOT / "assets", folder / "assets")
    abouts = {name.split("_", 1)[1]: caption for name, caption in captions().items()}
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
