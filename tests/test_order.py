"""Nothing goes through a set or a folder in the order that it happens to have: it differs from process to process."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT = ("modeling", "data", "retrieval", "evaluation", "hub_cards", "trainers", "src")
FOLDERS = {"glob", "iglob", "rglob", "iterdir", "listdir", "scandir", "walk"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
# Calls whose result does not depend on the order.
ANY_ORDER = {"sorted", "len", "any", "all", "min", "max", "fsum", "set", "frozenset", "bool", "update", "Counter"}
ORDERED = {"list", "tuple", "enumerate", "iter", "next", "zip", "map", "filter", "fromkeys", "join", "extend", "sum"}


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def annotated_set(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").startswith(("set", "frozenset"))


class Sets:
    """Which expressions of a function are sets: by their form, or by the names that such a form or type was given to."""

    def __init__(self, scope: ast.AST, shared: set[str]) -> None:
        self.names = set(shared)
        for node in ast.walk(scope):
            if isinstance(node, ast.AnnAssign) and annotated_set(node.annotation):
                self.names.add(ast.unparse(node.target))
            elif isinstance(node, ast.Assign) and self(node.value):
                self.names.update(ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.arg) and annotated_set(node.annotation):
                self.names.add(node.arg)

    def __call__(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.BitOr | ast.BitAnd | ast.BitXor):
            keys = called(node.left) in ("keys", "items") or called(node.right) in ("keys", "items")
            return keys or self(node.left) or self(node.right)
        name = called(node)
        return (
            isinstance(node, ast.Set | ast.SetComp)
            or name in {"set", "frozenset"} | SET_METHODS
            or (f"{name}()" if name else ast.unparse(node)) in self.names
        )


def iterated(node: ast.AST) -> list[ast.expr]:
    """Return the iterables of loops."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    return list(node.args) if isinstance(node, ast.Call) and called(node) in ORDERED else []


def any_order(tree: ast.Module) -> set[ast.AST]:
    """The comprehensions and calls whose result does not depend on the order."""
    free: set[ast.AST] = set()
    for node in ast.walk(tree):
        if called(node) in ANY_ORDER and isinstance(node, ast.Call):
            free.update(node.args)
            free.update(element for a in node.args if isinstance(a, ast.List) for element in a.elts)
        elif isinstance(node, ast.SetComp):
            free.add(node)
        elif isinstance(node, ast.Set):
            free.update(node.elts)
    return free | {generator for node in free for generator in getattr(node, "generators", ())}


def shared_sets(tree: ast.Module) -> set[str]:
    """Functions and fields of the file that are sets, as they are written where they are used."""
    nodes = list(ast.walk(tree))
    typed = [node for node in nodes if isinstance(node, ast.AnnAssign) and annotated_set(node.annotation)]
    fields = {ast.unparse(node.target) for node in typed if isinstance(node.target, ast.Attribute)}
    in_class = [line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body]
    fields |= {f"self.{ast.unparse(node.target)}" for node in typed if node in in_class}
    return fields | {f"{n.name}()" for n in nodes if isinstance(n, ast.FunctionDef) and annotated_set(n.returns)}


def unordered(source: str) -> Iterator[int]:
    """The lines that go through a set or a folder in no order."""
    tree = ast.parse(source)
    free, shared = any_order(tree), shared_sets(tree)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {node for scope in scopes for node in ast.walk(scope)}
    for scope in (tree, *scopes):
        sets = Sets(scope, shared)
        for node in ast.walk(scope):
            if node in free or (scope is tree and node in inside):
                continue
            for expression in iterated(node):
                name = called(expression)
                sorts = "ast.walk" in ast.unparse(expression) or (name == "walk" and "= sorted(" in ast.unparse(node))
                if (name in FOLDERS and not sorts) or sets(expression):
                    yield expression.lineno


@pytest.mark.parametrize(
    "bad",
    [
        "for name in names.keys() - {'a'}: pass",
        "x: set[str] = set()\n[y for y in x]",
        "list({1, 2})",
        "def f() -> set[str]: ...\n','.join(f())",
        "for file in folder.glob('*'): pass",
        "a = set(b)\nfor x in a | {1}: pass",
        "sum(weight[w] for w in set(words))",
        "print(*found.difference(other))",
    ],
)
def test_the_search_finds_them(bad: str) -> None:
    assert list(unordered(bad))


@pytest.mark.parametrize("good", ["sorted(x for x in set(y))", "any(x in y for x in {1})", "sorted([*p.glob('*')])"])
def test_what_is_the_same_in_any_order_is_left_alone(good: str) -> None:
    assert not list(unordered(good))


def test_nothing_in_the_product_depends_on_such_an_order() -> None:
    files = [file for folder in PRODUCT for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = {
        f"{file.relative_to(REPOSITORY)}:{line}"
        for file in files
        for line in unordered(file.read_text(encoding="utf-8"))
    }
    assert len(files) > 100 and sorted(found) == []
