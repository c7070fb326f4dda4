"""Runs on several nodes, with or without a shared disk: who writes into a folder, and copies of files that a node lacks.

The output folder may be the same folder on all nodes, or a folder of each node. This is found out, not configured. All functions
must be called by all processes.
"""

import shutil
from pathlib import Path
from uuid import uuid4

import torch
from torch import distributed as dist

from revela_hub.data.own_folder import is_ours
from revela_hub.errors import UserError, reason
from revela_hub.trainers.base.checkpoints import MEASUREMENTS_FOLDER, Record, checkpoint_to_resume, step_of
from revela_hub.trainers.base.processes import from_main, gathered, is_distributed, on_all, rank

RECEIVED_FOLDER = ".received"
"""Folder in the output folder for the checkpoint that a node gets from another one; deleted at the end of the run."""
BLOCK = 64 * 2**20
"""Bytes of a file that are sent at a time."""


def folder_owners(folder: Path) -> list[int]:
    """Create a folder on all nodes, and return for each process the first process that sees the same folder.

    Raises:
        OSError: this process cannot write to the folder.
        UserError: another process cannot.
    """
    on_all(lambda: folder.mkdir(parents=True, exist_ok=True))
    if not is_distributed():
        return [0]
    token = from_main(lambda: uuid4().hex)
    marks = [folder / f".seen-{token}-{number}" for number in range(dist.get_world_size())]
    own = marks[rank()]
    on_all(own.touch)
    try:
        return gathered(next(number for number, mark in enumerate(marks) if mark.exists()))
    finally:
        own.unlink(missing_ok=True)


def copy_missing(folder: Path, *, gives: bool, takes: bool) -> None:
    """Copy files of a folder, which may be missing on some nodes, to the nodes that lack them.

    One process per disk `gives`, which means that it lists the folder; with `takes`, it also receives files.

    Raises:
        UserError: a file cannot be written.
    """
    if not is_distributed():
        return
    files = {f.relative_to(folder).as_posix(): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    offers = gathered((files if gives else {}, gives and takes))
    copies = []
    for name in sorted(set().union(*(offered for offered, _ in offers))):
        source = next(number for number, (offered, _) in enumerate(offers) if name in offered)
        takers = [number for number, (offered, wants) in enumerate(offers) if wants and name not in offered]
        copies += [(name, offers[source][0][name], source, taker) for taker in takers]
    if not copies:
        return
    group = dist.new_group(backend="gloo")  # files are sent from CPU memory
    faults: list[OSError] = []
    for name, size, source, taker in copies:
        if rank() == source:
            _send(folder / name, size, taker, group)
        elif rank() == taker:
            _receive(folder / name, size, source, group, faults)

    def check() -> None:
        if faults:
            raise UserError(f"cannot copy files of another node to {folder}: {reason(faults[0])}") from faults[0]

    on_all(check)
    dist.destroy_process_group(group)


def _send(file: Path, size: int, taker: int, group: dist.ProcessGroup) -> None:
    with file.open("rb") as content:
        for start in range(0, size, BLOCK):
            block = bytearray(content.read(min(BLOCK, size - start)))
            dist.send(torch.frombuffer(block, dtype=torch.uint8), taker, group)


def _receive(file: Path, size: int, source: int, group: dist.ProcessGroup, faults: list[OSError]) -> None:
    """Write a file; after an error, receive the rest without writing it, because its sender waits."""
    blocks = (torch.empty(min(BLOCK, size - start), dtype=torch.uint8) for start in range(0, size, BLOCK))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as content:
            for block in blocks:
                dist.recv(block, source, group)
                content.write(block.numpy().data)
    except OSError as error:
        faults.append(error)
        for block in blocks:
            dist.recv(block, source, group)


def checkpoint_for_all(wanted: str | None, output: Path, owners: list[int]) -> tuple[Path | None, list[str], int]:
    """Find the checkpoint to resume from (or `last`, the newest of all nodes), and copy it to the nodes that lack it.

    `owners` is the result of `folder_owners` for the output folder.

    Returns:
        The checkpoint as this process sees it, if there is one; the newer ones that were skipped; a process that had it.

    Raises:
        UserError: the given checkpoint is not complete on any node.
    """
    found: Path | None = None
    skipped: list[str] = []
    error: UserError | None = None
    try:
        found, skipped = checkpoint_to_resume(wanted, output)
    except UserError as raised:
        error = raised
    record = Record.read(found) if found else None
    offers = gathered((record.written, step_of(found)) if found and record else None)
    best = max((offer for offer in offers if offer), default=None)
    if best is None:
        if error:
            raise error
        return None, skipped, 0
    source = offers.index(best)
    # On each disk, the first process that lacks the checkpoint receives it.
    takers = {owners[number]: number for number in reversed(range(len(offers))) if offers[number] != best}
    if not takers:
        return found, skipped, source
    name, lacks, takes = f"checkpoint-{best[1]}", offers[rank()] != best, rank() in takers.values()
    local = output / RECEIVED_FOLDER / name if lacks else found
    assert local is not None
    copy_missing(local, gives=takes or rank() == source, takes=takes)
    if owners[0] != owners[source] and offers[0] != best:  # the main process compares later scores with earlier ones
        if rank() == 0 and is_ours(output / MEASUREMENTS_FOLDER):
            shutil.rmtree(output / MEASUREMENTS_FOLDER)
        copy_missing(output / MEASUREMENTS_FOLDER, gives=rank() in (0, source), takes=rank() == 0)
    return local, skipped, source
