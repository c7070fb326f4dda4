"""Draws the pictures of the documentation as SVG, each for a light and a dark page: `python docs/figures.py`."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "_static" / "figures"
THEMES = {
    "light": {
        "text": "#1c2430",
        "soft": "#5b6675",
        "line": "#8792a2",
        "box": "#f3f5f8",
        "blue": "#2a62c9",
        "orange": "#b4530a",
    },
    "dark": {
        "text": "#e8ecf2",
        "soft": "#a3adbb",
        "line": "#6d7889",
        "box": "#232833",
        "blue": "#7fb0ff",
        "orange": "#ffab66",
    },
}


@dataclass
class Drawing:
    """Shapes of one picture in the colours of one theme."""

    width: int
    height: int
    colours: dict[str, str]
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, *lines: str, edge: str = "line") -> None:
        """Draw a box with centred lines of text, the first in bold."""
        fill, stroke = self.colours["box"], self.colours[edge]
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
        )
        for number, line in enumerate(lines):
            middle = y + height / 2 + 5 + 18 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, bold=number == 0, colour="text" if number == 0 else "soft")

    def text(
        self, x: float, y: float, text: str, *, bold: bool = False, colour: str = "soft", anchor: str = "middle"
    ) -> None:
        """Write one line of text."""
        weight, size = ("600", 14) if bold else ("400", 12.5)
        self.shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
            f' fill="{self.colours[colour]}">{escape(text)}</text>'
        )

    def arrow(
        self, *points: tuple[float, float], colour: str = "line", width: float = 1.6, dashed: bool = False
    ) -> None:
        """Draw an arrow through the points."""
        path = " L".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<path d="M{path}" fill="none" stroke="{self.colours[colour]}" stroke-width="{width}"{dash}'
            f' marker-end="url(#{colour})"/>'
        )

    def svg(self, title: str) -> str:
        """Return the picture."""
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
            f' markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" fill="{self.colours[name]}"/></marker>'
            for name in ("line", "blue", "orange")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img"'
            f' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(title)}</title>\n<defs>{markers}</defs>\n" + "\n".join(self.shapes) + "\n</svg>\n"
        )


def data_flow(colours: dict[str, str]) -> str:
    """Return the way from data to a published model."""
    d = Drawing(760, 560, colours)
    d.box(30, 10, 300, 56, "raw text or code", "folders, JSON lines, data sets")
    d.box(430, 10, 300, 56, "pairs, classes, scored sentences", "mined negatives, synthetic pairs")
    d.box(
        30,
        112,
        700,
        62,
        "datasets.Dataset with documented columns",
        "groups of chunks · spans · queries with passages · prompts with answers",
    )
    d.box(30, 220, 330, 56, "batch: dict of tensors", "the method's collator")
    d.box(30, 322, 330, 62, "model(**batch).loss", "modeling: torch and transformers only")
    d.box(30, 430, 330, 56, "checkpoint folder", "resumes bit for bit")
    d.box(430, 430, 300, 56, "model folder with card", "sentence-transformers, verified", edge="blue")
    d.box(430, 322, 300, 62, "retrieval", "vectors, indexes, BM25, hybrids")
    d.box(430, 220, 300, 56, "evaluation", "nDCG@10, intervals, probes")
    d.arrow((180, 66), (180, 110))
    d.text(190, 93, "data", anchor="start")
    d.arrow((580, 66), (580, 110))
    d.text(590, 93, "data/mixture", anchor="start")
    d.arrow((195, 174), (195, 218))
    d.text(205, 201, "trainers/<method>", anchor="start")
    d.arrow((195, 276), (195, 320))
    d.arrow((195, 384), (195, 428))
    d.text(205, 412, "save_model", anchor="start")
    d.arrow((360, 458), (428, 458), colour="blue")
    d.text(394, 448, "export", colour="blue")
    d.arrow((580, 430), (580, 386))
    d.text(590, 412, "encode", anchor="start")
    d.arrow((580, 322), (580, 278))
    d.arrow((730, 248), (748, 248), (748, 458), (732, 458), colour="orange", dashed=True)
    d.text(722, 302, "scores, into the card", colour="orange", anchor="end")
    d.arrow((580, 486), (580, 528), colour="blue")
    d.text(580, 548, "Hugging Face Hub", bold=True, colour="blue")
    d.text(590, 513, "publish", colour="blue", anchor="start")
    return d.svg("From data to a published model")


def in_batch_attention(colours: dict[str, str]) -> str:
    """Return chunks that attend to each other, weighted by similarities."""
    d = Drawing(760, 380, colours)
    weights = {2: ("0.1", 1.2), 3: ("0.8", 5.0), 4: ("0.1", 1.2)}
    d.text(120, 24, "chunks of a group", bold=True, colour="text")
    d.text(395, 24, "retriever", bold=True, colour="blue")
    d.text(640, 24, "language model", bold=True, colour="orange")
    texts = {1: "def area(w, h): ...", 2: "import logging ...", 3: "# width times height", 4: "class Socket: ..."}
    for number, text in texts.items():
        y = 44 + 78 * (number - 1)
        d.box(20, y, 200, 54, f"chunk {number}", text)
        d.arrow((220, y + 27), (318, y + 27))
        d.box(320, y, 150, 54, f"embedding e{number}", "one vector", edge="blue")
    d.box(560, 44, 180, 54, "predict chunk 1", "next-token loss", edge="orange")
    for number, (weight, width) in weights.items():
        y = 44 + 78 * (number - 1) + 27
        d.arrow((470, y), (650, y), (650, 100), colour="orange", width=width)
        d.text(560, y - 9, f"attention × Sim(1,{number}) = {weight}", colour="text")
    d.arrow((470, 71), (558, 71), colour="blue", dashed=True)
    d.text(514, 62, "similarities", colour="blue")
    d.text(
        380,
        364,
        "If chunk 3 makes chunk 1 easier to predict, the gradient raises Sim(1,3), and the retriever learns.",
        colour="soft",
    )
    return d.svg(
        "In-batch attention: chunk 1 is predicted while attending to the other chunks, weighted by the retriever's similarities"
    )


def experts(colours: dict[str, str]) -> str:
    """Return one layer with a query and a passage expert."""
    d = Drawing(760, 250, colours)
    d.box(20, 40, 150, 54, "query", "how is gout treated?")
    d.box(20, 150, 150, 54, "passage", "Gout is treated ...")
    d.box(240, 40, 150, 164, "self-attention", "shared by both")
    d.box(460, 40, 150, 54, "query expert", "feed-forward", edge="blue")
    d.box(460, 150, 150, 54, "passage expert", "feed-forward", edge="orange")
    for y, colour in ((67, "blue"), (177, "orange")):
        d.arrow((170, y), (238, y), colour=colour)
        d.arrow((390, y), (458, y), colour=colour)
        d.arrow((610, y), (668, y), colour=colour)
        d.text(712, y - 4, "dense and", colour="text")
        d.text(712, y + 14, "sparse vector", colour="text")
    d.text(380, 238, "one layer; the score of a pair is the sum of both dot products")
    return d.svg("A layer of CoT-MoTE: shared self-attention, separate feed-forward experts")


def imprag(colours: dict[str, str]) -> str:
    """Return a decoder whose bottom layers retrieve and whose middle layers read."""
    d = Drawing(760, 330, colours)
    d.box(250, 20, 230, 66, "top layers", "write the answer")
    d.box(250, 116, 230, 66, "middle layers", "attend to passages and prompt", edge="orange")
    d.box(250, 212, 230, 66, "bottom layers", "encode the prompt", edge="blue")
    d.box(560, 212, 180, 66, "index", "passage vectors", edge="blue")
    d.box(560, 116, 180, 66, "passages", "keys and values", edge="orange")
    d.arrow((365, 212), (365, 184))
    d.arrow((365, 116), (365, 88))
    d.arrow((480, 245), (558, 245), colour="blue")
    d.text(519, 235, "query", colour="blue")
    d.arrow((650, 212), (650, 184), colour="blue")
    d.arrow((560, 149), (482, 149), colour="orange")
    d.text(519, 139, "read", colour="orange")
    d.arrow((365, 312), (365, 280))
    d.text(375, 304, "Q: Who wrote Emma? A:", anchor="start", colour="text")
    d.arrow((250, 53), (192, 53))
    d.text(185, 58, "Jane Austen", anchor="end", bold=True, colour="text")
    d.text(240, 204, "retrieval layer", anchor="end")
    d.text(240, 108, "last reading layer", anchor="end")
    return d.svg("ImpRAG: the bottom layers retrieve, the middle layers read, the top layers answer")


FIGURES = {"data-flow": data_flow, "in-batch-attention": in_batch_attention, "experts": experts, "imprag": imprag}


def draw() -> dict[str, str]:
    """Return the text of every file, by its name."""
    return {
        f"{name}-{theme}.svg": figure(colours) for name, figure in FIGURES.items() for theme, colours in THEMES.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in draw().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
