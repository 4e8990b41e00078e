"""What a page defines beside its module, such as the writer of its own log: tests damage the log that it teaches."""

import ast
import dis
import json
from pathlib import Path
from types import CodeType

NOTEBOOKS = Path(__file__).resolve().parents[1] / "nbs"


def global_names(code):
    "The names that code looks up outside of itself, its inner functions included."
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(global_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def statements(page):
    "(imports of all cells, what the cells that are not exported define: name -> the first statement that does)."
    imports, definitions = [], {}
    for cell in json.loads((NOTEBOOKS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(source)
        bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.If))]
        imports += [n for body in bodies for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
        for node in [] if source.startswith("#| export") else tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            for t in targets:
                if isinstance(t, ast.Name | ast.FunctionDef | ast.ClassDef):
                    definitions.setdefault(getattr(t, "id", None) or t.name, node)
    return imports, definitions


def names_of(page, module, *names):
    """Values of names that a page defines in cells that are not exported; nothing else of the page runs.

    Args:
        page: such as "04_sources/44_navsim"
        module: that the page exports; what it exports is the module's
        names: of functions or constants of the page

    Returns:
        a tuple, or one value for one name
    """
    imports, definitions = statements(page)
    missing = [n for n in names if n not in definitions]
    if missing:
        raise KeyError(f"nbs/{page}.ipynb defines no {missing[0]!r} outside of what it exports")
    namespace, needed, wanted = dict(vars(module)), set(), list(names)
    while wanted:
        if (name := wanted.pop()) not in needed:
            needed.add(name)
            wanted += global_names(compile(ast.Module([definitions[name]], []), page, "exec")) & definitions.keys()
    body = imports + [node for name, node in definitions.items() if name in needed]
    exec(compile(ast.Module(body, []), page, "exec"), namespace)
    return namespace[names[0]] if len(names) == 1 else tuple(namespace[n] for n in names)
