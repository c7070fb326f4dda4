r"""Files whose markup or kind the file name does not tell: Markdown with front matter, manual pages, code without a suffix."""

import re
from itertools import pairwise

# The metadata of a page of Jekyll, Hugo, Docusaurus or MkDocs, in YAML (---) or TOML (+++), and its title.
FRONT_MATTER = re.compile(
    r"\s*(?P<mark>---|\+{3})[ \t\r]*\n(?=[\w.\"-]+[ \t]*[:=])(?:.*\n)*?(?P=mark)[ \t\r]*(?:\n|\Z)"
)
_TITLE = re.compile(r"^title[ \t]*[:=](?![ \t]*[>|])(.*)", re.M)
# A comment, which readers do not see; or a block of code, which is kept.
_COMMENT = re.compile(r"(^```.*?^```)|<!--(?:(?!<!--).)*?-->", re.DOTALL | re.MULTILINE)

# A script (`#!/bin/sh`), or a C or C++ header: after comments, a directive of the preprocessor.
_CODE = re.compile(
    r"#!|\s*(?:(?://[^\n]*\n|/\*.*?\*/)\s*)*#[ \t]*(?:include|ifn?def|if|define|undef|pragma)\b", re.DOTALL
)

MANUAL_PAGE = re.compile(r"\.[1-9][a-z]{0,6}(?:\.gz)?$")
"""Ending of a manual page's file name, such as `ls.1` or `printf.3p.gz`."""
_ROFF = re.compile(r"\s*(?=['.])(?:.*\n)*?\.(?:TH|Dd|so)\b")
_MACRO = re.compile(r"['.][ \t]*(\S*)[ \t]*(.*)")
_WORD = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_ESCAPE = re.compile(r"\\(?:f(?:\[\w*\]|\(..|.)|s[+-]?\d+|[hvwl]'[^']*'|\*(?:\[\w*\]|\(..|.)|\((..)|\[(\w+)\]|(.))")
_LETTERS = {
    "aq": "'",
    "dq": '"',
    "lq": "\u201c",
    "rq": "\u201d",
    "oq": "\u2018",
    "cq": "\u2019",
    "em": "\u2014",
    "0": " ",
}
_LETTERS |= {"en": "\u2013", "hy": "-", "bu": "\u2022", "co": "\u00a9", "ha": "^", "ti": "~", "rs": "\\", "e": "\\"}
_SILENT = '&|^%/,:c"'
_FONTS = frozenset("BI BR IB IR RB RI".split())
_TEXT = frozenset("B I SB SM UR MT OP".split())
_HEADINGS, _BREAKS = frozenset("SH SS Sh Ss".split()), frozenset("PP P LP TP TQ IP HP Pp It br sp".split())
# Macros of mdoc, which may also stand within a line; the others print nothing.
_MDOC = frozenset(
    "Ad An Ap Aq Ar Bc Bo Bq Brc Bro Cd Cm Dc Do Dq Dv Em Er Ev Fa Fl Fn Ft Ic In Li Lk Ms Mt Nd Nm No Ns Oc Oo Op Pa Pc Pf Po Pq Qc "
    "Ql Qo Qq Sc So Sq Sx Sy Ta Tn Va Vt Xc Xo Xr".split()
)


def front_matter_title(block: str) -> str:
    """Return the title in the front matter of a page; "" without one."""
    found = _TITLE.search(block)
    return found[1].strip(" \t\r\"'") if found else ""


def markdown_text(text: str) -> str:
    r"""Return Markdown without comments and front matter, of which the title is kept, on the same lines.

    >>> markdown_text("---\ntitle: Rivers\ntags: [water]\n---\nThey flow. <!-- check -->")
    '\n\nRivers\n\nThey flow. '
    """
    text = _COMMENT.sub(lambda match: match[1] or "", text)
    if block := FRONT_MATTER.match(text):
        title, lines, rest = front_matter_title(block[0]), block[0].count("\n"), text[block.end() :]
        repeated = re.match(rf"\s*#*\s*{re.escape(title)}\s*$", rest, re.M)  # by the heading
        kept = "\n" * lines if repeated or lines < 2 else "\n" * (lines - 2) + f"{title}\n\n"
        text = kept + rest
    return text


def is_code(text: str) -> bool:
    r"""Return whether a file without a suffix is a program.

    >>> is_code("// <vector> -*- C++ -*-\n#ifndef _VECTOR"), is_code("#!/bin/sh"), is_code("# A title"), is_code("Notes")
    (True, True, False, False)
    """
    return _CODE.match(text) is not None


def is_manual_page(text: str) -> bool:
    """Return whether a text is the source of a manual page, in man or mdoc."""
    return _ROFF.match(text) is not None


def manual_page_text(text: str) -> str:
    r"""Return the text of a manual page, with headings as in Markdown.

    >>> manual_page_text('.TH LS 1\n.SH NAME\nls \\- list\n.TP\n.BR \\-a ", " \\-\\-all\nshow \\fBall\\fP files')
    '# LS(1)\n\n## NAME\n\nls - list\n\n-a, --all\nshow all files'
    >>> manual_page_text(".Dt SSH 1\n.Nm ssh\n.Nd remote login\n.Pp\n.Nm\n.Op Fl p Ar port\n.Bl -tag")
    '# SSH(1)\nssh\nremote login\n\nssh\n-p port'
    """
    lines: list[str] = []
    ends = called = ""  # the end of a table or of a definition, which are skipped; the name of the page
    for line in text.replace("\\\n", "").splitlines():
        macro = _MACRO.fullmatch(line)
        name = macro[1] if macro else ""
        if ends:
            ends = "" if name == ends else ends
        elif macro is None:
            lines.append(_plain(line))
        elif name in ("de", "de1", "am", "ig", "TS", "EQ"):
            ends = {"TS": "TE", "EQ": "EN"}.get(name, ".")
        else:
            words = [_plain(first.replace('""', '"') or second) for first, second in _WORD.findall(macro[2])]
            if name == "Nm":
                called = words[0] if words and not called else called
                words = words or [called]
            if (printed := _printed(name, words)) is not None:
                lines.append(printed)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _printed(name: str, words: list[str]) -> str | None:
    """Return the line that a macro prints."""
    if name in ("TH", "Dt") and len(words) > 1:
        return f"# {words[0]}({words[1]})"
    if name in _HEADINGS and words:
        return f"\n{'##' if name.upper() == 'SH' else '###'} {' '.join(words)}\n"
    if name in _FONTS:
        return "".join(words)
    if name in _MDOC or name == "It":
        words = [f"-{word}" if flag == "Fl" else word for flag, word in pairwise([name, *words]) if word not in _MDOC]
        return f"\n{' '.join(words)}" if name == "It" else " ".join(words) or None
    if name in _BREAKS:
        return f"\n{words[0]}" if words and name in ("IP", "HP") else ""
    return " ".join(words) or None if name in _TEXT else None


def _plain(text: str) -> str:
    """Return a text without the escapes of roff."""

    def letter(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[3] or ""
        return "" if name in _SILENT else _LETTERS.get(name, name if match[3] else "")

    return _ESCAPE.sub(letter, text)
