"""Functions with a docstring or a comment above them, in several languages and with all ends of lines."""

from pathlib import Path

import pytest

from revela_hub.evaluation.functions import commented_functions
from revela_hub.evaluation.probe import ProbeSettings, build_probe

JAVA = """\
/*
 * Copyright the authors of this program, all rights reserved.
 */
package example;

/** A class with some methods that work on rivers. */
public class Rivers {
    /**
     * Returns the length of a river in {@code metres} from its source.
     * Tributaries are left out.
     *
     * @param name the name of the river
     */
    @Override
    public int length(String name)
            throws IOException
    {
        // the longest of all the known courses of it
        int metres = 1000 * courses.get(name).max();

        return metres;
    }

    // too short a comment
    int a() {
        b();
    }
}
"""
RUBY = """\
  # Returns every river of a country, sorted by its name.
  #
  # country - the country
  def rivers(country)
    all.select { |river| river.country == country }
       .sort_by(&:name)
  end

  def other
  end
"""
CPP = """\
// Adds the water of a lake to the river below it, which
// may flood. \\param lake the lake
template <typename T>
void add(const Lake<T> &lake,
         int times) {
  level += lake.level * times;
}
#include <x>
// This is only a condition with a longer comment.
if (a) {
  b();
}
"""


@pytest.mark.parametrize(
    ("text", "query", "first", "last", "comment"),
    [
        (
            JAVA,
            "Returns the length of a river in metres from its source. Tributaries are left out.",
            "@Override",
            "}",
            6,
        ),
        (RUBY, "Returns every river of a country, sorted by its name.", "def rivers(country)", "end", 3),
        (
            CPP,
            "Adds the water of a lake to the river below it, which may flood. \\param lake the lake",
            "template <typename T>",
            "}",
            2,
        ),
    ],
    ids=["Java", "Ruby", "C++"],
)
def test_a_comment_and_its_function(text: str, query: str, first: str, last: str, comment: int) -> None:
    [found] = commented_functions(text)
    assert found.query == query
    lines = found.code.splitlines()
    assert (lines[0], lines[-1]) == (first, last)
    assert found.removed.count("\n") == comment and text.count(found.removed) == 1
    assert "metres = 1000" not in text or "// the longest" in found.code


def test_a_probe_of_javascript(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.js").write_text(
            f"/** Builds the river number {number} with care and returns it. */\n"
            f"function make{number}(value) {{\n  const kept = value + {number};\n  return log(kept);\n}}\n"
        )
        (tmp_path / f"{number}.css").write_text("/* not a function of any kind, though */\na {\n  color: red;\n}\n")
    probe = build_probe(str(tmp_path), ProbeSettings(queries=20, passages=40))
    assert probe.kinds == {"docstring": 20} and len(probe.task.corpus) == 30
    assert all("Builds the river" not in text for text in probe.task.corpus.values())
    assert all(text.startswith("Builds the river") for text in probe.task.queries.values())
    assert sum(map(len, probe.held_out.values())) == 20
