"""The one-line mistakes that a tired person makes, of the source of one cell: sign, comparison, axis, mask, factor."""

import ast
import itertools
import re
from dataclasses import dataclass

MARKS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
NEXT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
NEGATED = {ast.In: ("in", "not in"), ast.Is: ("is", "is not")}
OPPOSITE = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}
OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
OTHER |= {"sin": "cos", "cos": "sin", "mean": "sum", "sum": "mean", "floor": "ceil", "ceil": "floor"}
OTHER |= {"argmin": "argmax", "argmax": "argmin"}
TEXTS = {"isinstance", "getattr", "hasattr", "setattr", "print", "warn"}
DRAWN = re.compile(r"\b(ax|axes|fig|plt)\b\.")


@dataclass(frozen=True)
class Break:
    "One mistake: its kind, where it is in the source (characters), and what stands there then."

    kind: str
    begin: int
    end: int
    text: str

    def apply(self, source):
        return source[: self.begin] + self.text + source[self.end :]

    def line(self, source):
        "The line before and after, and its number from 1."
        number = source.count("\n", 0, self.begin)
        return number + 1, source.splitlines()[number].strip(), self.apply(source).splitlines()[number].strip()


def left_out(node):
    "Texts, types and drawings: a mistake there turns no number."
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in TEXTS


def walk(node):
    "The nodes that compute, without annotations, decorators, and what `left_out` says."
    if left_out(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def whole(node):
    "Whether it is a whole number that is written down, with its sign."
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and type(node.value) is int


class Finder:
    "Collects the breaks of one cell."

    def __init__(self, source):
        self.source, self.found = source, []
        lines = source.encode().splitlines(keepends=True)
        self.starts, self.raw = [0], source.encode()
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))

    def at(self, line, column):
        "Characters before a place that Python counts in bytes of a line."
        return len(self.raw[: self.starts[line - 1] + column].decode())

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node):
        begin, end = self.span(node)
        return self.source[begin:end]

    def add(self, kind, begin, end, text):
        self.found.append(Break(kind, begin, end, text))

    def between(self, kind, left, right, operators):
        "Another operator between two operands; brackets of theirs stay."
        begin, end = self.span(left)[1], self.span(right)[0]
        for old, new in operators:
            place = self.source.find(old, begin, end)
            if place >= 0:
                self.add(kind, place, place + len(old), new)

    def compare(self, node):
        for left, operator, right in zip([node.left, *node.comparators[:-1]], node.ops, node.comparators, strict=True):
            kind = type(operator)
            if kind in NEGATED:
                self.between("mask", left, right, [NEGATED[kind]])
            elif kind in MARKS:
                exact = whole(left) or whole(right) or kind not in OPPOSITE  # of two lengths < and <= are one
                self.between("comparison", left, right, [(MARKS[kind], (NEXT if exact else OPPOSITE)[kind])])

    def binary(self, node):
        begin, end = self.span(node)
        left, right = node.left, node.right
        if isinstance(left, ast.JoinedStr) or isinstance(getattr(left, "value", None), str):
            return  # text
        pairs = {ast.Add: [("+", "-")], ast.Sub: [("-", "+")], ast.BitAnd: [("&", "|")], ast.BitOr: [("|", "&")]}
        if type(node.op) in pairs:
            kind = "sign" if isinstance(node.op, ast.Add | ast.Sub) else "mask"
            self.between(kind, left, right, pairs[type(node.op)])
        if isinstance(node.op, ast.Mult | ast.Div):
            self.add("factor", begin, end, self.source[begin : self.span(left)[1]] + self.closing(begin, left))

    def closing(self, begin, left):
        "Brackets that were opened before the left operand ended."
        text = self.source[begin : self.span(left)[1]]
        return ")" * (text.count("(") - text.count(")"))

    def unary(self, node):
        begin, end = self.span(node)
        if isinstance(node.op, ast.USub) and not whole(node):
            self.add("sign", begin, end, self.of(node.operand))
        if isinstance(node.op, ast.Not | ast.Invert):
            self.add("mask", begin, end, f"({self.of(node.operand)})")

    def either(self, node):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            self.between("mask", left, right, [(f"{old} ", f"{new} ")])

    def call(self, node):
        plain = [a for a in node.args if isinstance(a, ast.Name | ast.Attribute | ast.Subscript | ast.Call)]
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if len(plain) >= 2 and plain[:2] == node.args[:2] and self.of(plain[0]) != self.of(plain[1]):
            if name not in (*OTHER, "zip", "partial", "replace"):
                (a, b), (c, d) = self.span(plain[0]), self.span(plain[1])
                self.add("swapped", a, d, self.of(plain[1]) + self.source[b:c] + self.of(plain[0]))
        if name in OTHER:
            _, end = self.span(node.func)
            self.add("function", end - len(name), end, OTHER[name])
        for key in node.keywords:
            if key.arg in ("dim", "axis") and whole(key.value):
                begin, end = self.span(key.value)
                self.add("axis", begin, end, "0" if self.of(key.value) != "0" else "-1")

    def constant(self, node):
        begin, end = self.span(node)
        if type(node.value) is bool:
            self.add("mask", begin, end, str(not node.value))
        elif type(node.value) is int and abs(node.value) < 1000:
            self.add("off by one", begin, end, str(node.value + 1))
        elif type(node.value) is float and node.value:
            self.add("factor", begin, end, f"{2 * node.value:g}")


VISITS = {ast.Compare: Finder.compare, ast.BinOp: Finder.binary, ast.UnaryOp: Finder.unary, ast.BoolOp: Finder.either}
VISITS |= {ast.Call: Finder.call, ast.Constant: Finder.constant}


def breaks(source):
    """All mistakes of one exported cell that still compile, in the order of their places.

    Args:
        source: Python. Lines that draw, docstrings, texts, annotations, imports and errors are left out.
    """
    finder, lines = Finder(source), source.splitlines()
    for node in walk(ast.parse(source)):
        if visit := VISITS.get(type(node)):
            visit(finder, node)
    kept = []
    for b in sorted(set(finder.found), key=lambda b: (b.begin, b.end, b.kind)):
        number, old, new = b.line(source)
        if old == new or DRAWN.search(lines[number - 1]):
            continue
        try:
            ast.parse(b.apply(source))
        except SyntaxError:
            continue
        kept.append(b)
    return kept
