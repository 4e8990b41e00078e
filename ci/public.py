"""What `help()` would leave open in the public layer of a module: python ci/public.py [files].

For each name in `__all__`: a docstring, an annotation of every parameter and of what comes back, `Args:` (or
`Attributes:`) that names every parameter and field, `Returns:` or `Yields:` where something comes back. A parameter
whose annotation is one class, such as `policy: Policy`, may be left out: the class says what it is. A line that holds a
linter's comment says nothing.
"""

import ast
import re
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]


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


def says_itself(parameter):
    "Whether its annotation is one class, which `help()` shows and which has a docstring of its own."
    return (
        isinstance(parameter.annotation, ast.Name)
        and parameter.annotation.id not in ("Any", "ArrayLike", "Callable")
        and (parameter.annotation.id[0].isupper())
    )


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


def function_faults(function):
    "What help() of a function would leave open."
    doc, name = ast.get_docstring(function) or "", function.name
    if not doc:
        yield f"{name}: no docstring"
    yield from unannotated(function, name)
    yield from of_a_linter(doc, name)
    yield from (
        f"{name}: `{p.arg}` is not told" for p in parameters(function) if not says_itself(p) and not told(p.arg, doc)
    )
    nothing = function.returns is not None and ast.unparse(function.returns) in ("None", "NoReturn")
    if not nothing and not re.search(r"^(Returns|Yields):", doc, re.M):
        yield f"{name}: no Returns"


def described(field):
    "A class variable, or a key or setting, whose unit stands beside it and is written into the docstring."
    if "ClassVar" in ast.unparse(field.annotation):
        return True
    own = isinstance(field.value, ast.Call) and ast.unparse(field.value.func) in ("key", "same", "setting")
    return own and len(field.value.args) > 1


def class_faults(node):
    "What help() of a class would leave open: its fields or constructor, and its public methods."
    doc, name = ast.get_docstring(node) or "", node.name
    if not doc:
        yield f"{name}: no docstring"
    data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    fields = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and not described(s)] if data else []
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") and method.name != "__init__":
            continue
        yield from unannotated(method, f"{name}.{method.name}", True)
        if method.name == "__init__":
            fields += [p.arg for p in parameters(method, True) if not says_itself(p)]
            doc += "\n" + (ast.get_docstring(method) or "")
        elif not ast.get_docstring(method):
            yield f"{name}.{method.name}: no docstring"
    yield from of_a_linter(doc, name)
    yield from (f"{name}: `{f}` is not told" for f in fields if not f.startswith("_") and not told(f, doc))


def faults(source):
    "Every fault of a module's public layer, in the order of its lines."
    tree = ast.parse(source)
    public = public_names(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in public:
            yield from function_faults(node)
        if isinstance(node, ast.ClassDef) and node.name in public:
            yield from class_faults(node)


def modules(context, parameter, files):
    "Python files."
    if wrong := [f for f in files if f.suffix != ".py"]:
        raise click.BadParameter(f"{wrong[0]} is no .py file")
    return files


@click.command(help=__doc__)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), callback=modules)
def main(files):
    files = files or sorted((ROOT / "drivelit").rglob("*.py"))
    found = [f"{f}: {fault}" for f in files for fault in faults(f.read_text(encoding="utf-8"))]
    print("\n".join(found) or "nothing is left open")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
