"""What `help()` would leave open in the public layer of a module: python ci/public.py [files].

For each name in `__all__`: a docstring, an annotation of every parameter and of what comes back. What another package
of drivelit uses, or docs/PACKAGE.md shows, has `Args:` (or `Attributes:`) that names every parameter and field, too,
and `Returns:` or `Yields:` where the annotation of what comes back does not say it (an array, a dict, a tuple); one
line is enough for everything else. A parameter
may be left out if its annotation is one class, such as `policy: Policy` or `scenes: Sequence[Scene]`, for the class
says what it is; or if its name is in the table `COMMON`, which CONTRIBUTING.md shows. A line that only repeats the
name, the annotation or that table is a fault, as is one that holds a linter's comment: both say nothing.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
# Parameters that mean the same everywhere, so that `Args:` need not name them.
COMMON = {
    "ax": "axes to draw on; by default those of a new figure",
    "camera": "a key of scene.cameras",
    "codec": "turns pictures into tokens and back",
    "horizon": "of a plan or a trajectory: how many points, how far apart",
    "inputs": "what the policy is shown",
    "max_new_tokens": "of each answer, at most",
    "out": "the run's folder, or another folder that is written",
    "policy": "sees, answers and drives; it writes its answers",
    "prepared": "a scene for the metrics, of `pdm.prepare`",
    "profile": "the run's numbers, such as those of AutoDrive-P3",
    "rng": "the generator of random numbers",
    "seed": "of whatever is random in a run: everything, a draw, an order, sampling",
    "stage": "a stage of the run, by its name",
    "title": "of the figure, the panel or the table",
}
SAYS_LITTLE = ("Any", "ArrayLike", "Callable", "Iterable", "Mapping", "Sequence")
VAGUE = ("Any", "Callable", "DataFrame", "Iterator", "Mapping", "Tensor", "dict", "ndarray", "tuple")  # of a result
RESULTS = "address folder id label list message name none number object order path result row sentence text".split()
FILLERS = "a an and are for in is it its likewise of on or that the their them these this to what which".split()


def named_in(tree):
    "The names that a module imports, those of attributes, and those in strings, which may name what comes later."
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            yield from re.findall(r"\w+", node.value)


@cache
def users():
    "name -> the packages of drivelit that name it; `docs` where the code in docs/PACKAGE.md does."
    found, package = {}, ROOT / "drivelit"
    for path in package.rglob("*.py"):
        if path.name != "_modidx.py":
            for name in named_in(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(name, set()).add(path.relative_to(package).parts[0])
    page = (ROOT / "docs/PACKAGE.md").read_text(encoding="utf-8")
    for name in re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`]+`", page, re.S))):
        found.setdefault(name, set()).add("docs")
    return found


def public_names(tree):
    "The names in a module's `__all__`."
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def parameters(function, method=False):
    "The arguments that a caller gives."
    a = function.args
    listed = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    static = any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list)
    return listed[1:] if method and not static else listed


def told(name, doc):
    "Does a line of `Args:` or `Attributes:` name it? One line may name several: `x, y: metres`."
    return re.search(rf"^[ \t]+(?:\*{{0,2}}\w+, )*\*{{0,2}}{name}(?:, \*{{0,2}}\w+)*(?: \([^)\n]*\))?:", doc, re.M)


def is_class(annotation):
    "Whether an annotation is one class, or a sequence of one: `help()` shows it, and it has a docstring of its own."
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return is_class(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Iterable", "Sequence", "list"):
        return is_class(annotation.slice) and ast.unparse(annotation.slice) != "Path"
    if isinstance(annotation, ast.BinOp):
        return is_class(annotation.left) and is_class(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id not in SAYS_LITTLE and annotation.id[0].isupper()


def says_itself(parameter):
    "Whether `Args:` may leave it out."
    return parameter.arg in COMMON or is_class(parameter.annotation)


def words(text):
    """The words of a text, in lower case and in the singular; `MindDriverProfile` is three.

    What leads somewhere, a name in backticks or a constant such as PLAYS, is no word but itself.
    """
    leads = re.findall(r"`(?:\w+\.)*(\w+)`|\b([A-Z_]{4,})\b", text)
    text = re.sub(r"`[^`]*`|\b[A-Z_]{4,}\b", " ", text.replace("run's", "run"))
    parts = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+|\d+", text)
    plain = {w[:-1] if len(w) > 3 and w.endswith("s") else w for w in map(str.lower, parts)}
    return plain - {*FILLERS} | {f"`{a or b}`" for a, b in leads}


def entries(doc):
    "The entries of `Args:`: a pair of the names and the text of each."
    for section in re.findall(r"^[ \t]*Args:\n((?:[ \t]+\S.*(?:\n|$))+)", doc, re.M):
        indent = re.match(r"[ \t]+", section).group(0)
        for entry in re.split(rf"^{indent}(?=\S)", section, flags=re.M)[1:]:
            if told := re.match(r"((?:\*{0,2}\w+, )*\*{0,2}\w+)(?: \([^)\n]*\))?:(.*)", entry, re.S):
                yield [n.lstrip("*") for n in told.group(1).split(", ")], " ".join(told.group(2).split())


def is_ritual(names, text, types, doc):
    "Whether an entry says only what the names, their annotations or `COMMON` say, or is a size that nothing else uses."
    if re.fullmatch(r"[A-Z]( of them)?", text):
        return len(re.findall(rf"\b{text[0]}\b", doc)) == 1
    return all(words(text) <= words(f"{n} {types.get(n, '')} {COMMON.get(n, '')}") for n in names)


def rituals(function, doc, name):
    "Entries that say nothing."
    types = {p.arg: ast.unparse(p.annotation) if p.annotation else "" for p in parameters(function)}
    for names, text in entries(doc):
        if is_ritual(names, text, types, doc):
            yield f"{name}: `{', '.join(names)}: {text}` says nothing new"


def is_vague(returns):
    "Whether an annotation leaves open what comes back: shapes, keys, the order of several."
    return bool({*VAGUE} & {*re.findall(r"\w+", ast.unparse(returns))})


def is_result_ritual(function, doc):
    "Whether `Returns:` says only what the annotation and the first line say."
    section = re.search(r"^(?:Returns|Yields):\n((?:    .*(?:\n|$))+)", doc, re.M)
    if not section or function.returns is None or is_vague(function.returns):
        return False
    first_line = doc.partition("\n\n")[0]
    return words(section.group(1)) <= words(f"{ast.unparse(function.returns)} {first_line}") | {*RESULTS}


def of_a_linter(doc, name):
    "Lines that a tool has made of a comment such as `# noqa: B008`."
    for line in re.findall(r"^[ \t]+(\*{0,2}\w+: (?:noqa|type: ignore|fmt: )\b.*)$", doc, re.M):
        yield f"{name}: `{line}` is a linter's comment"


def unannotated(function, name, method=False):
    "What has no type."
    for p in parameters(function, method):
        if p.annotation is None:
            yield f"{name}: `{p.arg}` has no annotation"
    if function.returns is None and function.name != "__init__":
        yield f"{name}: no annotation of what it returns"


def function_faults(function, full):
    "What help() of a function would leave open; `full`: its arguments and what it returns are told, too."
    doc, name = ast.get_docstring(function) or "", function.name
    if not doc:
        yield f"{name}: no docstring"
    yield from unannotated(function, name)
    yield from of_a_linter(doc, name)
    yield from rituals(function, doc, name)
    if is_result_ritual(function, doc):
        yield f"{name}: `Returns:` says nothing new"
    if not full:
        return
    yield from (
        f"{name}: `{p.arg}` is not told" for p in parameters(function) if not says_itself(p) and not told(p.arg, doc)
    )
    nothing = function.returns is not None and ast.unparse(function.returns) in ("None", "NoReturn")
    if not nothing and not re.search(r"^(Returns|Yields):", doc, re.M):
        if function.returns is None or is_vague(function.returns):
            yield f"{name}: no Returns"


def described(field):
    "A class variable, or a key or setting, whose unit stands beside it and is written into the docstring."
    if "ClassVar" in ast.unparse(field.annotation):
        return True
    own = isinstance(field.value, ast.Call) and ast.unparse(field.value.func) in ("key", "same", "setting")
    return own and len(field.value.args) > 1


def class_faults(node, full):
    "What help() of a class would leave open: its public methods; `full`: its fields or constructor, too."
    doc, name = ast.get_docstring(node) or "", node.name
    if not doc:
        yield f"{name}: no docstring"
    data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    fields = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and not described(s)] if data else []
    _, _, attributes = doc.partition("Attributes:\n")  # the site would make two entries of one name
    attributes = re.findall(r"^ +(\w+):", attributes, re.M)
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") and method.name != "__init__":
            continue
        yield from unannotated(method, f"{name}.{method.name}", True)
        yield from rituals(method, ast.get_docstring(method) or "", f"{name}.{method.name}")
        if is_result_ritual(method, ast.get_docstring(method) or ""):
            yield f"{name}.{method.name}: `Returns:` says nothing new"
        if method.name == "__init__":
            yield from rituals(method, doc, name)
            fields += [p.arg for p in parameters(method, True) if not says_itself(p)]
            doc += "\n" + (ast.get_docstring(method) or "")
        elif not ast.get_docstring(method):
            yield f"{name}.{method.name}: no docstring"
        if method.name in attributes:
            yield f"{name}: `{method.name}` is told twice, as an attribute and by its own docstring"
    yield from of_a_linter(doc, name)
    if full:
        yield from (f"{name}: `{f}` is not told" for f in fields if not f.startswith("_") and not told(f, doc))


def faults(source, package=None):
    "Every fault of a module's public layer, in the order of its lines; `package`: its own, None: all is told in full."
    tree = ast.parse(source)
    public = public_names(tree)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in public:
            continue
        full = package is None or bool(users().get(node.name, set()) - {package})
        yield from (function_faults if isinstance(node, ast.FunctionDef) else class_faults)(node, full)


def package_of(path):
    "The package of drivelit that a file belongs to; None if it is another file."
    try:
        return path.resolve().relative_to(ROOT / "drivelit").parts[0]
    except ValueError:
        return None


def modules(context, parameter, files):
    "Python files."
    if wrong := [f for f in files if f.suffix != ".py"]:
        raise click.BadParameter(f"{wrong[0]} is no .py file")
    return files


@click.command(help=__doc__)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), callback=modules)
def main(files):
    files = files or sorted((ROOT / "drivelit").rglob("*.py"))
    found = [f"{f}: {fault}" for f in files for fault in faults(f.read_text(encoding="utf-8"), package_of(f))]
    print("\n".join(found) or "nothing is left open")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
