"""Check that the size and the first bytes of a file match its name.

`contents.py` decides by name whether a file belongs to a model; here its content must match.
"""

import mmap
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

# First bytes -> format.
_MAGIC = {
    b"PK\x03\x04": "a zip archive (such as a torch pickle or a numpy .npz file)",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"\x1f\x9d": "a compressed archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x04\x22\x4d\x18": "an lz4 archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"MSCF\0": "a cabinet archive",
    b"\x7fELF": "a program",
    b"MZ\x90\0": "a program",
    b"\xca\xfe\xba\xbe": "a program",
    b"\xcf\xfa\xed\xfe": "a program",
    b"\0asm": "a program",
    b"\x93NUMPY": "a numpy file, which may contain a pickle",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"PAR1": "a Parquet file",
    b"SQLite format 3\0": "a database",
    b"%PDF-": "a PDF file",
    b"version https://git-lfs": "a Git LFS pointer, not the file: run git lfs pull",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05]")  # protocols 2 to 5
_CLASS = re.compile(r"[\w.]+ [\w.]+")  # module and name
_ARGUMENTS = {"MARK", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "GET", "BINGET", "LONG_BINGET"}
_PICTURE = re.compile(r".*\.(png|jpe?g|gif|webp)", re.IGNORECASE)
_SENTENCEPIECE = re.compile(r".*\.(model|spm)(\.v\d+)?")
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.\w+|merges\.txt|bpe\.codes|.*\.(model|spm|tiktoken)(\.v\d+)?")
_RANKS = re.compile(rb"(?:[A-Za-z0-9+/]+={0,2} \d+\r?\n?)+")  # tiktoken: lines of a token in base64 and its rank
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_NUL = re.compile(rb"\0")  # vocabularies may contain any other character
_ONNX_FIELDS = {1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26}
MIB = 2**20


def content_faults(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield the files that are too large, or whose content does not match their name.

    The content of weights and JSON files is checked in `files.py` instead, that of ONNX weights when they are loaded.
    """
    for name in names:
        if name.endswith((".safetensors", ".onnx_data")):
            continue
        if name.endswith(".onnx"):
            if not is_onnx(folder / name):
                yield f"{name} is not an ONNX file"
            continue
        size, limit = (folder / name).stat().st_size, _limit(name)
        if size > limit:
            yield f"{name} has {size:,} bytes, more than the {limit // MIB} MiB allowed for this kind of file"
        elif not name.endswith(".json") and (what := _other_content(name, (folder / name).read_bytes())):
            yield f"{name} is {what}"


def _limit(name: str) -> int:
    """Return the maximum size in bytes: several times that in the largest published models."""
    last = PurePosixPath(name).name
    if _VOCABULARY.fullmatch(last):
        return 128 * MIB
    return 64 * MIB if last.endswith(".index.json") or _PICTURE.fullmatch(last) else 16 * MIB


def known_content(data: bytes) -> str | None:
    """Return the format of archives, pickles, programs and data of other libraries; None for other content."""
    for magic, what in _MAGIC.items():
        if data.startswith(magic):
            return what
    if data[257:262] == b"ustar":
        return "a tar archive"
    if _PICKLE.match(data) or _is_calling_pickle(data):
        return "a pickle, which can run code when loaded"
    if b"PK\x05\x06" in data[-66_000:]:
        return "also a zip archive: one is appended to the file"
    return None


def _is_calling_pickle(data: bytes) -> bool:
    """Return whether the bytes are a pickle without a header that calls a function; nothing is run.

    Protocols 0 and 1 are text. Some words of a vocabulary look like opcodes (`cos`, `int`), but a text has others before them.
    """
    seen: set[str] = set()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            seen.add(opcode.name)
            calls = (
                opcode.name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX")
                and seen & {"GLOBAL", "STACK_GLOBAL"}
                and seen & _ARGUMENTS
            )
            makes = opcode.name == "OBJ" or (opcode.name == "INST" and _CLASS.fullmatch(str(argument)))
            # No text consists of 100,000 opcodes, but a pickle may hide a call behind them.
            if calls or (makes and "MARK" in seen) or number > 100_000:
                return True
    except (ValueError, OverflowError):  # not an opcode, or without its argument
        pass
    return False


def _other_content(name: str, data: bytes) -> str | None:
    """Return what the file contains if that does not match its name, otherwise None."""
    if what := known_content(data):
        return what
    if _PICTURE.fullmatch(name):
        return None
    if _SENTENCEPIECE.fullmatch(name):
        fine = is_sentencepiece(data) or _RANKS.fullmatch(data)
        return None if fine else "neither a SentencePiece model nor a list of tokens and ranks"
    text = data.decode("utf-16", errors="replace").encode() if data[:2] in (b"\xff\xfe", b"\xfe\xff") else data
    if found := (_NUL if _VOCABULARY.fullmatch(PurePosixPath(name).name) else _CONTROL).search(text):
        return f"not text: byte {found.start()} is {found.group()!r}"
    return None


def is_sentencepiece(data: bytes) -> bool:
    """Return whether the bytes are a SentencePiece `ModelProto`: only protobuf fields, including pieces."""
    try:
        fields = {field for field, _, _ in _entries(data, 0, len(data), kinds=(2,))}  # all are messages
    except (IndexError, ValueError):
        return False
    return 1 in fields and all(1 <= field <= 5 or field >= 200 for field in fields)  # higher numbers are extensions


def is_onnx(file: Path) -> bool:
    """Return whether a file is an ONNX `ModelProto`: only fields of this message, including a version and a graph."""
    try:
        with _mapped(file) as data:
            fields = {field for field, _, _ in _entries(data, 0, len(data))}
        return {1, 7} <= fields <= _ONNX_FIELDS
    except (IndexError, ValueError):
        return False


def onnx_outputs(file: Path) -> list[str]:
    """Return the names of the outputs of an ONNX file; empty if it is not one."""
    try:
        with _mapped(file) as data:
            graph = next((start, stop) for field, start, stop in _entries(data, 0, len(data)) if field == 7)
            outputs = [(start, stop) for field, start, stop in _entries(data, *graph) if field == 12]
            names = [next(part for part in _entries(data, *output) if part[0] == 1) for output in outputs]
            return [data[start:stop].decode() for _, start, stop in names]
    except (IndexError, ValueError, StopIteration):
        return []


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    """Open a file without reading it; an empty one raises a ValueError."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _entries(
    data: bytes | mmap.mmap, place: int, end: int, kinds: tuple[int, ...] = (0, 2)
) -> Iterator[tuple[int, int, int]]:
    """Yield the field number of each entry of a protobuf message, and where its content starts and stops.

    Raises:
        ValueError: an entry has another wire type than `kinds` (0 is a number, 2 has a length), or ends after the message.
    """
    while place < end:
        key, place = _varint(data, place)
        value, start = _varint(data, place)
        if key & 7 not in kinds:
            raise ValueError("not a protobuf message of this format")
        place = start + (value if key & 7 == 2 else 0)
        if place > end:
            raise ValueError("the file ends early")
        yield key >> 3, start, place


def _varint(data: bytes | mmap.mmap, place: int) -> tuple[int, int]:
    """Return the protobuf number at a position, and the position after it."""
    number = shift = 0
    while True:
        byte = data[place]
        number, place, shift = number | (byte & 127) << shift, place + 1, shift + 7
        if byte < 128:
            return number, place
        if shift > 63:
            raise IndexError
