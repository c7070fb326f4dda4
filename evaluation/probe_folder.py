"""The folder of a probe: a BEIR folder, with the texts that are held out of training and the settings of the probe."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from revela_hub.data.sources.beir import RetrievalTask, read_beir, write_beir
from revela_hub.data.sources.documents import HELD_OUT
from revela_hub.evaluation.probe import Probe
from revela_hub.files import claim, local_path, scratch_folder

SETTINGS_FILE = "probe.json"


def write_probe(probe: Probe, folder: str | Path) -> Path:
    """Write the task as a BEIR folder (split `test`), with `held_out.jsonl` and `probe.json`, in place of an earlier probe.

    Raises:
        UserError: The folder contains files other than those of an earlier probe.
    """
    folder = local_path(folder)
    metadata = asdict(probe.settings) | {
        "made": dict(probe.kinds),
        "documents_used": len(set(probe.documents_of.values())),
        "documents_read": probe.documents,
        "all_of_the_text": probe.complete,
    }
    rows = ({"document": id_, "text": text} for id_, texts in probe.held_out.items() for text in texts)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with scratch_folder("probe", claim(folder)) as part:  # other files in the folder are kept
        write_beir(probe.task, part)
        (part / HELD_OUT).write_text(lines, encoding="utf-8", newline="\n")
        (part / SETTINGS_FILE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        for file in part.rglob("*.*"):
            target = folder / file.relative_to(part)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)
    return folder


def read_probe_task(folder: str | Path) -> RetrievalTask:
    """Read the task in a folder written by `revela-hub probe` (or any BEIR folder), with the name "probe"."""
    return replace(read_beir(folder), name="probe")
