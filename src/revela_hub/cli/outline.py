"""Reads the options of a command without importing its module, because importing torch and transformers takes seconds.

A dataclass is rebuilt from its source: only the statements that its fields need are executed, i.e. the class with its fields
and without its methods, its base classes, and the constants and types they name, each in its own module. Imports from other
packages than those in PARSED_PACKAGES are executed if they are cheap, and replaced by empty classes otherwise.
"""

import ast
import builtins
import copy
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Read as source, besides the package of the module itself: argument dataclasses and their base classes.
PARSED_PACKAGES = {"revela_hub", "transformers", "sentence_transformers", "trl"}
# Packages that are imported because that is cheap.
IMPORTED_PACKAGES = {*sys.stdlib_module_names, "annotated_types", "packaging"}


@cache
def outline(name: str) -> "Outline":
    """Return the outline of a module by its full name."""
    return Outline(name)


class Outline:
    """The names of a module, each created on first use: `outline("package.module")["NAME"]`."""

    def __init__(self, name: str) -> None:
        """Read the module's source."""
        file = _source_file(name)
        self.name = name
        self.package = name if file.stem == "__init__" else name.rpartition(".")[0]
        self.names: dict[str, Any] = {"__name__": name, "__file__": str(file), "__builtins__": _Builtins(self)}
        self.bindings: dict[str, ast.stmt] = {}
        stub = file.with_suffix(".pyi")  # the names of a package that imports lazily
        trees = [ast.parse(path.read_bytes()) for path in (file, stub) if path.is_file()]
        self.__doc__ = ast.get_docstring(trees[0], clean=False)
        for tree in trees:
            for statement in _statements(tree.body):
                for bound in _bound(statement):
                    self.bindings.setdefault(bound, statement)

    def __getitem__(self, name: str) -> Any:
        """Return the object of that name.

        Raises:
            NameError: The module does not bind the name at its top level, or inside an `if` or `try` there.
        """
        if name not in self.names:
            statement = self.bindings.get(name)
            if statement is None:
                raise NameError(f"name {name!r} is not defined in {self.name}")
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.names[name] = self._imported(statement, name)
            else:
                code = compile(ast.Module([_bare(statement)], []), self.name, "exec", dont_inherit=True)
                exec(code, self.names)
        return self.names[name]

    def __getattr__(self, name: str) -> Any:
        """Support `module.NAME` in a statement."""
        try:
            return self[name]
        except NameError as error:
            raise AttributeError(name) from error

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        original = next(alias.name for alias in statement.names if name in (alias.asname, alias.name.partition(".")[0]))
        module = self._absolute(statement) if isinstance(statement, ast.ImportFrom) else original
        top = module.partition(".")[0]
        if top in IMPORTED_PACKAGES:
            return (
                getattr(importlib.import_module(module), original)
                if module != original
                else importlib.import_module(top)
            )
        if top not in {*PARSED_PACKAGES, self.name.partition(".")[0]} or module == original:
            return type(name, (), {})
        return outline(module)[original] if original in outline(module).bindings else outline(f"{module}.{original}")

    def _absolute(self, statement: ast.ImportFrom) -> str:
        above = self.package.split(".")[: -(statement.level - 1) or None] if statement.level else []
        return ".".join([*above, *filter(None, [statement.module])])


class _Builtins(dict[str, Any]):
    """The built-in names for executed statements; names of the module that do not exist yet are created here."""

    def __init__(self, outline: Outline) -> None:
        super().__init__(vars(builtins))
        self._outline = outline

    def __missing__(self, name: str) -> Any:
        try:
            return self._outline[name]
        except NameError as error:
            raise KeyError(name) from error


def _source_file(name: str) -> Path:
    """Return the path of a module's source without importing its parent packages, unlike `importlib.util.find_spec`."""
    path = None
    words = name.split(".")
    for end in range(1, len(words) + 1):
        finders = (finder.find_spec(".".join(words[:end]), path) for finder in sys.meta_path)
        spec = next((spec for spec in finders if spec is not None), None)
        if spec is None:
            break
        path = spec.submodule_search_locations
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise ModuleNotFoundError(f"no source of {name}", name=name)
    return Path(spec.loader.path)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements at a module's top level and inside its `if`, `try` and `with` blocks."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody") if isinstance(statement, (ast.If, ast.Try, ast.With)) else ():
            yield from _statements(getattr(statement, part, []))


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds."""
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bare(statement: ast.stmt) -> ast.stmt:
    """Return a class with only its fields and constants, and with no decorator except `dataclass`."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    bare = copy.copy(statement)
    bare.body = [
        part
        for part in statement.body
        if isinstance(part, (ast.Assign, ast.AnnAssign)) and not any(name.startswith("__") for name in _bound(part))
    ] or [ast.copy_location(ast.Pass(), statement)]
    bare.decorator_list = [part for part in statement.decorator_list if "dataclass" in ast.unparse(part)]
    return bare
