"""examples/quickstart/task.py: what is held out is nowhere in what may be trained on, and each query has one answer."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def docstring_task(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("task", repository / "examples" / "quickstart" / "task.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.docstring_task


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    for file in range(3):
        folder = root / f"part{file}"
        folder.mkdir(parents=True)
        functions = [FUNCTION.format(name=f"thing{file}x{i}", number=10 * file + i) for i in range(10)]
        (folder / "code.py").write_text("import log\n" + "".join(functions))
    return root


def test_held_out_docstrings_leave_the_text_and_the_functions(docstring_task: Any, sources: Path) -> None:
    built = docstring_task(sources, queries=8, seed=3)
    task = built.task
    assert (len(task.queries), len(task.corpus)) == (8, 30)
    text = "".join(built.sources.values())
    for id_, query in task.queries.items():
        assert task.qrels[id_] == {id_: 1}
        assert query.startswith("Builds the thing")
        name = query.split()[2]
        assert query not in text
        assert f"A second paragraph about {name}." not in text
        assert f"def make_{name}(value):" in text
        assert f"def make_{name}(value):" in task.corpus[id_]
        assert task.corpus[id_].startswith("@decorated")
    assert not any('"""' in code for code in task.corpus.values())
    assert text.count('"""') == 2 * (30 - 8)


def test_what_has_no_single_answer_or_is_not_code_is_left_out(docstring_task: Any, sources: Path) -> None:
    twice = FUNCTION.format(name="twin", number=1)
    (sources / "twins.py").write_text(twice + twice.replace("make_twin", "make_other"))
    (sources / "broken.py").write_text("def f(:\n")
    (sources / "latin.py").write_bytes(b"# caf\xe9\n")
    (sources / "short.py").write_text('def f():\n    """Does what it does very well."""\n    return 1\n')
    hidden = sources / ".venv" / "site-packages"
    hidden.mkdir(parents=True)
    (hidden / "x.py").write_text(FUNCTION.format(name="hidden", number=1))
    task = docstring_task(sources).task
    assert len(task.corpus) == 30
    assert len(task.queries) == 15
