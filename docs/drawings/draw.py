"""The drawings of the documents, as SVG: python docs/drawings/draw.py"""

from __future__ import annotations

from pathlib import Path

from retrograde.measure.pictures import style_of

FOLDER = Path(__file__).resolve().parent

# The colours of memory modes are those of all pictures, and of nothing else: forward is teal, backward is red.
INK, TEAL, RED, GREY, PALE = (
    "#27313f",
    "#0f766e",
    "#b5305a",
    "#5f6b7a",
    "#eef1f4",
)


class Drawing:
    """Shapes on a white sheet, in the order in which they were drawn. Narrow, so that words can be read on a phone."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" '
            f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" fill="{INK}">\n'
            f"<title>{title}</title>\n"
        )
        self.shapes = [
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "middle",
        colour: str = INK,
        size: int = 14,
    ) -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        words: str,
        *,
        width: int = 56,
        fill: str = PALE,
        line: str = TEAL,
        stroke: int = 1,
    ) -> None:
        """A box around words, centred at x, y."""
        dash = ' stroke-dasharray="4 4"' if fill == "none" else ""
        self.shapes.append(
            f'<rect x="{x - width / 2}" y="{y - 16}" width="{width}" height="32" rx="6" '
            f'fill="{fill}" stroke="{line}" stroke-width="{stroke}"{dash}/>'
        )
        self.text(x, y + 5, words)

    def circle(self, x: float, y: float, sign: str, colour: str = TEAL) -> None:
        self.shapes.append(
            f'<circle cx="{x}" cy="{y}" r="12" fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>'
        )
        self.text(x, y + 6, sign, colour=colour, size=18)

    def arrow(self, *points: tuple[float, float], colour: str = INK) -> None:
        """A line through points, with a head at the last one, which is reached along x or along y."""
        (x0, y0), (x, y) = points[-2:]
        path = " ".join(f"{a},{b}" for a, b in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        left, right = (
            (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx),
            (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx),
        )
        self.shapes.append(
            f'<polygon points="{x},{y} {left[0]},{left[1]} {right[0]},{right[1]}" fill="{colour}"/>'
        )

    def svg(self) -> str:
        return self.head + "\n".join(self.shapes) + "\n</svg>\n"


def block() -> Drawing:
    """A two-stream block, forward and undone."""
    sheet = Drawing(480, 390, "A block with two streams, forward and undone")
    for top, sign, names, order, colour in (
        (30, "+", ("x0", "x1", "y0", "y1"), ("f", "g"), TEAL),
        (225, "−", ("y0", "y1", "x0", "x1"), ("g", "f"), RED),
    ):
        upper, lower = top + 35, top + 135
        sheet.text(
            20,
            top,
            "forward"
            if sign == "+"
            else "inverse: the last update is undone first",
            anchor="start",
            colour=colour,
        )
        sheet.text(30, upper + 5, names[0])
        sheet.text(30, lower + 5, names[1])
        for i, name in enumerate(order):
            x = 150 + 160 * i
            source, target = (lower, upper) if name == "f" else (upper, lower)
            sheet.box(x, (upper + lower) / 2, name)
            reach = 16 if source > target else -16
            middle = (upper + lower) / 2
            sheet.arrow((x, source), (x, middle + reach))
            sheet.arrow(
                (x, middle - reach),
                (x, target + (12 if source > target else -12)),
                colour=colour,
            )
        for y, name in ((upper, names[2]), (lower, names[3])):
            sheet.arrow((48, y), (425, y))
            sheet.text(450, y + 5, name)
        for i, name in enumerate(order):
            sheet.circle(
                150 + 160 * i, upper if name == "f" else lower, sign, colour
            )
    return sheet


def memory() -> Drawing:
    """What each memory mode has in memory during the backward pass of one block."""
    sheet = Drawing(
        540, 340, "What is in memory during the backward pass of block 3"
    )
    sheet.text(
        20,
        30,
        "In memory during the backward pass of block 3 of 6",
        anchor="start",
        size=16,
    )
    rows = (
        ("store", "the activations of every block before it"),
        ("checkpoint", "the input of every block before it"),
        ("reverse", "nothing of the blocks before it"),
    )
    for row, (name, words) in enumerate(rows):
        y = 90 + 85 * row
        colour, _ = style_of(name)
        sheet.text(20, y - 24, f"{name}: {words}", anchor="start")
        for i in range(6):
            x = 65 + 84 * i
            past, here = i < 3, i == 3
            held = here or (past and name == "store")
            sheet.box(
                x,
                y,
                f"block {i}",
                width=62,
                fill=PALE if held else "none",
                line=colour if held else GREY,
                stroke=2 if held else 1,
            )
            if here or (past and name == "checkpoint"):
                sheet.shapes.append(
                    f'<rect x="{x - 42}" y="{y - 16}" width="7" height="32" fill="{colour}"/>'
                )
    sheet.shapes.append(
        f'<rect x="23" y="309" width="7" height="18" fill="{INK}"/>'
    )
    sheet.text(38, 323, "streams", anchor="start")
    sheet.shapes.append(
        f'<rect x="118" y="309" width="26" height="18" rx="4" fill="{PALE}" stroke="{INK}"/>'
    )
    sheet.text(152, 323, "activations of a block's branches", anchor="start")
    return sheet


def replay() -> Drawing:
    """How autograd gets a tensor that was not saved."""
    sheet = Drawing(500, 342, "How autograd gets a tensor that was not saved")
    columns = (
        (
            TEAL,
            "forward",
            "a branch runs in ordinary autograd",
            "autograd asks to save a tensor",
            "it gets handle 7 instead, and saves no tensor",
        ),
        (
            RED,
            "backward",
            "autograd asks for handle 7",
            "the step is undone, its branch runs again",
            "autograd gets the tensor of this second run",
        ),
    )
    for column, (colour, name, *boxes) in enumerate(columns):
        x = 130 + 240 * column
        sheet.text(x, 32, name, colour=colour, size=16)
        for i, words in enumerate(boxes):
            _note(sheet, x, 76 + 84 * i, words, colour)
            if i:
                sheet.arrow((x, 18 + 84 * i), (x, 50 + 84 * i), colour=colour)
    sheet.text(250, 306, "The graph is the ordinary one:", colour=GREY)
    sheet.text(
        250, 323, "hooks, DDP and double backward see nothing new.", colour=GREY
    )
    return sheet


def _note(sheet: Drawing, x: float, y: float, words: str, colour: str) -> None:
    """A wide box, centred at x, y, with words on one line or two."""
    first, _, rest = _broken(words)
    sheet.shapes.append(
        f'<rect x="{x - 105}" y="{y - 26}" width="210" height="52" rx="6" fill="{PALE}" stroke="{colour}"/>'
    )
    sheet.text(x, y - 4 if rest else y + 5, first)
    if rest:
        sheet.text(x, y + 14, rest)


def _broken(words: str) -> tuple[str, str, str]:
    """Words on one line, or on two of about the same length."""
    if len(words) < 24:
        return words, "", ""
    spaces = [i for i, letter in enumerate(words) if letter == " "]
    cut = min(spaces, key=lambda i: abs(i - len(words) / 2))
    return words[:cut], " ", words[cut + 1 :]


def notebook() -> Drawing:
    """The badge of the README that leads to the notebook."""
    sheet = Drawing(204, 24, "The first ten minutes, a notebook")
    sheet.shapes = [
        f'<rect width="204" height="24" rx="5" fill="{TEAL}"/>',
        f'<path d="M5 0 h71 v24 h-71 a5 5 0 0 1 -5 -5 v-14 a5 5 0 0 1 5 -5 z" fill="{INK}"/>',
    ]
    sheet.text(38, 16.5, "notebook", colour="#ffffff", size=13)
    sheet.text(140, 16.5, "first ten minutes", colour="#ffffff", size=13)
    return sheet


DRAWINGS = {
    "block.svg": block,
    "memory.svg": memory,
    "notebook.svg": notebook,
    "replay.svg": replay,
}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
