"""Installed packages: wheel, sdist and plain `pip install` hold the whole package; its metadata, imports and Makefile."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import revela_hub

FOLDERS = {
    "revela_hub": "src/revela_hub",
    **{f"revela_hub/{name}": name for name in ("modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards")},
}
COPIED = (*FOLDERS.values(), "tests", "examples", "benchmarks", ".ci")


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """The output of a command that must succeed; its environment is this one, changed as said."""
    ended = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(tree: Path, kind: str) -> Path:
    """Builds a "wheel" or an "sdist" of the tree with the back end itself, which needs no network."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    run(sys.executable, "-c", code, cwd=tree)
    (built,) = (tree / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def tree(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: building writes into its tree, and the editable installation lives there."""
    if not (repository / "setup.py").exists():
        pytest.skip("the tests are not in a checkout")
    tree = tmp_path_factory.mktemp("build")
    for folder in COPIED:
        if (repository / folder).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(repository / folder, tree / folder, ignore=ignored)
    for file in repository.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, "wheel")


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build(tree, "sdist")


def wheel_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


# --- what the archives hold


def test_wheel_holds_every_file_of_the_package_and_nothing_else(tree: Path, wheel: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(tree / folder)}"
        for package, folder in FOLDERS.items()
        for path in (tree / folder).rglob("*")
        if path.is_file() and (path.suffix in {".py", ".pyi", ".j2", ".yaml"} or path.name == "py.typed")
    }
    assert wheel_files(wheel) == expected
    assert {"revela_hub/py.typed", "revela_hub/cli/main.py", "revela_hub/cli/commands/__init__.py"} < expected
    assert [name for name in expected if name.startswith("revela_hub/hub_cards/") and name.endswith(".j2")]


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path)
    (unpacked,) = tmp_path.iterdir()
    assert {"LICENSE", "Makefile", "constraints.txt", "tests", "examples", ".ci"} <= {
        p.name for p in unpacked.iterdir()
    }
    assert (unpacked / "tests" / "conftest.py").exists()
    assert wheel_files(build(unpacked, "wheel")) == wheel_files(wheel)


def test_installed_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ("-q", "--no-deps", "--no-index", "--no-compile", "--no-input", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, wheel)
    code = (
        "import importlib, pathlib, pkgutil, sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'revela_hub']: del sys.modules[name]\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import revela_hub\n"
        "root = pathlib.Path(revela_hub.__file__).parent\n"
        "names = [m.name for m in pkgutil.walk_packages([str(root)], 'revela_hub.') if not m.name.endswith('__main__')]\n"
        "for name in names: importlib.import_module(name)\n"
        "files = {pathlib.Path(sys.modules[name].__file__) for name in names}\n"
        "assert all(file.is_relative_to(sys.argv[1]) for file in files), files\n"
        "print(len(names), revela_hub.__version__, (root / 'py.typed').exists())\n"
    )
    out = run(sys.executable, "-c", code, target, cwd=tmp_path).split()
    assert int(out[0]) > len(FOLDERS)
    assert out[1:] == [revela_hub.__version__, "True"]
    help_text = run(sys.executable, "-m", "revela_hub", "--help", cwd=tmp_path, PYTHONPATH=str(target))
    assert "train revela" in help_text


# --- what importing costs


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, revela_hub\n"
        "third_party = {n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names - before - {'revela_hub', 'lazy_loader'}\n"
        "sys.exit(','.join(sorted(third_party)) or 0)"
    )
    # What site-packages' own .pth files import is not ours.
    run(sys.executable, "-c", f"import sys; before = {{n.partition('.')[0] for n in sys.modules}}\n{code}")


@pytest.mark.parametrize("name", [name for name in revela_hub.__all__ if name != "__version__"])
def test_public_names_are_there(name: str) -> None:
    value = getattr(revela_hub, name)
    assert value.__name__ == name
    assert value.__module__.startswith("revela_hub.")


# --- metadata


def requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    """The requirements that hold here (extras counted as wanted), by their canonical names."""
    parsed = [Requirement(line) for line in lines]
    wanted = [r for r in parsed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *EXTRAS))]
    return {canonicalize_name(requirement.name): requirement for requirement in wanted}


EXTRAS = "demo documents endpoint eval milvus mteb onnx ray search synthesis test docs dev".split()


def test_version_and_extras_of_the_installed_package() -> None:
    metadata = importlib.metadata.metadata("revela-hub")
    assert metadata["Version"] == revela_hub.__version__
    assert set(EXTRAS) == set(metadata.get_all("Provides-Extra"))
    scripts = importlib.metadata.entry_points(group="console_scripts", name="revela-hub")
    assert {script.value for script in scripts} == {"revela_hub.cli.main:main"}


def test_constraints_pin_every_direct_dependency_inside_its_range(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = requirements(line for line in lines if line and not line.startswith("#"))
    direct = requirements(importlib.metadata.requires("revela-hub") or [])
    del direct["revela-hub"]  # its own extras
    assert set(direct) - set(pins) == set()
    for name, requirement in direct.items():
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{name} {pin.version} is outside {requirement.specifier}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know which distribution has which module")
def test_every_import_of_the_package_is_declared(repository: Path) -> None:
    declared = requirements(importlib.metadata.requires("revela-hub") or [])
    distributions = importlib.metadata.packages_distributions()
    imported = {
        module
        for folder in FOLDERS.values()
        for file in (repository / folder).rglob("*.py")
        for module in re.findall(r"^\s*(?:import|from) ([A-Za-z_]\w*)", _code(file), re.MULTILINE)
        if not file.with_name(f"{module}.py").exists()  # a script next to it
    }
    # deepspeed is only imported for weights that it has sharded itself.
    for module in imported - set(sys.stdlib_module_names) - {"revela_hub", "deepspeed"}:
        names = {canonicalize_name(name) for name in distributions.get(module, [module])}
        assert names & set(declared), f"{module} is imported, but {names} is not a dependency"


def _code(file: Path) -> str:
    """A module's text without its triple-quoted strings, whose lines may begin like imports."""
    return re.sub(r'"""[\s\S]*?"""', "", file.read_text(encoding="utf-8"))


# --- the repository's own promises


def test_one_description_in_all_places(repository: Path) -> None:
    [sentence] = re.findall(r'^description = "(.*)"$', (repository / "pyproject.toml").read_text(), re.MULTILINE)
    for name in ("README.md", "CITATION.cff", "docs/index.md", "src/revela_hub/__init__.py"):  # --help prints the last
        assert f"{sentence}." in " ".join((repository / name).read_text(encoding="utf-8").split()), name


def test_make_targets_in_the_documents_exist(repository: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE)
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (repository / name).read_text(encoding="utf-8")
        for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
            assert target in targets, f"{name}: make {target}"
