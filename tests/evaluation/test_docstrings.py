"""Functions with docstrings: what they are, wherever they stand and however their lines end."""

import ast

import pytest

from revela_hub.evaluation.docstrings import _functions, documented_functions, python_lines

FUNCTION = '''
@decorated
def make_{name}(value):
    """Builds the {name} of a value and returns it.

    A second paragraph about {name}.
    """
    result = value + {number}
    log(result)
    return result
'''


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_files_with_other_ends_of_lines_have_the_same_functions(end: str) -> None:
    method = FUNCTION.format(name="thing", number=1).replace("    log", "\n    log").replace("\n", "\n    ")
    text = f"class A:{method}"
    other = text.replace("\n", end)
    found = documented_functions(text)
    assert documented_functions(other) == found and found[0].code.startswith("@decorated\ndef make_thing")
    first, last = found[0].docstring_lines
    removed = "".join(python_lines(other)[first - 1 : last])
    assert removed in other and removed.count(end) == 4


def test_functions_are_found_wherever_a_statement_may_stand() -> None:
    """All that `ast.walk` finds, in its order, on which the choice of what is held out depends."""
    text = """
def a():
    def b(): pass
    with x: 
        async def c(): pass
    return lambda: 1
class D:
    @property
    def d(self): pass
    if x:
        def e(self): pass
    elif y:
        def f(self): pass
    else:
        class G:
            def g(self): pass
try:
    def h(): pass
except E:
    def i(): pass
else:
    def j(): pass
finally:
    def k(): pass
for _ in x:
    def l(): pass
while x:
    def m(): pass
match x:
    case 1:
        def n(): pass
"""
    tree = ast.parse(text)
    expected = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert list(_functions(tree)) == expected and len(expected) == 14
