"""A virtual environment with only the given packages, linked from the current environment without downloads."""

import csv
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(folder: Path, *packages: str) -> Path:
    """Create the environment with the packages and their requirements, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip())
    wanted, seen = list(packages), set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        record = package.read_text("RECORD") or ""  # package.files asks the disk for each of a hundred thousand files
        for top in {row[0].split("/")[0] for row in csv.reader(record.splitlines())} - {".."}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
        needs = map(Requirement, package.requires or ())
        wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return python


if __name__ == "__main__":
    print(make_environment(Path(sys.argv[1]), *sys.argv[2:]))
