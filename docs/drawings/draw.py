"""The drawings of the documents, as SVG: python docs/drawings/draw.py"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent

INK, BLUE, RED, ORANGE, GREY, PALE = "#27313f", "#2b6cb0", "#b5305a", "#d08c3c", "#9aa3af", "#e8eef7"


class Drawing:
    """Shapes on a white sheet, in the order in which they were drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" fill="{INK}">\n'
            f"<title>{title}</title>\n"
        )
        self.shapes = [f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>']

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK, size: int = 14
    ) -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    def box(self, x: float, y: float, words: str, *, width: int = 56, fill: str = PALE, line: str = BLUE) -> None:
        """A box around words, centred at x, y."""
        dash = ' stroke-dasharray="4 4"' if fill == "none" else ""
        self.shapes.append(
            f'<rect x="{x - width / 2}" y="{y - 16}" width="{width}" height="32" rx="6" '
            f'fill="{fill}" stroke="{line}"{dash}/>'
        )
        self.text(x, y + 5, words)

    def circle(self, x: float, y: float, sign: str, colour: str = BLUE) -> None:
        self.shapes.append(f'<circle cx="{x}" cy="{y}" r="12" fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>')
        self.text(x, y + 6, sign, colour=colour, size=18)

    def arrow(self, *points: tuple[float, float], colour: str = INK) -> None:
        """A line through points, with a head at the last one, which is reached along x or along y."""
        (x0, y0), (x, y) = points[-2:]
        path = " ".join(f"{a},{b}" for a, b in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
        self.shapes.append(f'<polygon points="{x},{y} {left[0]},{left[1]} {right[0]},{right[1]}" fill="{colour}"/>')

    def svg(self) -> str:
        return self.head + "\n".join(self.shapes) + "\n</svg>\n"


def block() -> Drawing:
    """A two-stream block, forward and undone."""
    sheet = Drawing(720, 400, "A block with two streams, forward and undone")
    for top, sign, names, order, colour in (
        (30, "+", ("x0", "x1", "y0", "y1"), ("f", "g"), BLUE),
        (225, "−", ("y0", "y1", "x0", "x1"), ("g", "f"), RED),
    ):
        upper, lower = top + 35, top + 135
        sheet.text(
            20, top, "forward" if sign == "+" else "undone, the last update first", anchor="start", colour=colour
        )
        sheet.text(30, upper + 5, names[0])
        sheet.text(30, lower + 5, names[1])
        for i, name in enumerate(order):
            x = 210 + 250 * i
            source, target = (lower, upper) if name == "f" else (upper, lower)
            sheet.box(x, (upper + lower) / 2, name)
            reach = 16 if source > target else -16
            middle = (upper + lower) / 2
            sheet.arrow((x, source), (x, middle + reach))
            sheet.arrow((x, middle - reach), (x, target + (12 if source > target else -12)), colour=colour)
        for y, name in ((upper, names[2]), (lower, names[3])):
            sheet.arrow((48, y), (650, y))
            sheet.text(675, y + 5, name)
        for i, name in enumerate(order):
            sheet.circle(210 + 250 * i, upper if name == "f" else lower, sign, colour)
    return sheet


def memory() -> Drawing:
    """What each memory mode has in memory while one block goes backward."""
    sheet = Drawing(720, 330, "What is in memory while block 3 goes backward")
    sheet.text(20, 30, "In memory while block 3 of 6 goes backward", anchor="start", size=16)
    rows = (
        ("store", "every block before it keeps its activations", ORANGE),
        ("checkpoint", "every block before it keeps its input", BLUE),
        ("reverse", "nothing is kept before it", RED),
    )
    for row, (name, words, colour) in enumerate(rows):
        y = 80 + 85 * row
        sheet.text(20, y + 5, name, anchor="start", colour=colour)
        for i in range(6):
            x = 190 + 92 * i
            past, here = i < 3, i == 3
            held = here or (past and name == "store")
            sheet.box(x, y, f"block {i}", width=66, fill=PALE if held else "none", line=colour if held else GREY)
            if here or (past and name == "checkpoint"):
                sheet.shapes.append(f'<rect x="{x - 43}" y="{y - 16}" width="7" height="32" fill="{colour}"/>')
        sheet.text(157, y + 38, words, anchor="start", colour=GREY, size=13)
    sheet.shapes.append(f'<rect x="20" y="301" width="7" height="18" fill="{INK}"/>')
    sheet.text(34, 315, "streams", anchor="start", size=13)
    sheet.shapes.append(f'<rect x="110" y="301" width="26" height="18" rx="4" fill="{PALE}" stroke="{INK}"/>')
    sheet.text(144, 315, "activations of a block's branches", anchor="start", size=13)
    return sheet


def replay() -> Drawing:
    """How autograd gets a saved tensor that was never kept."""
    sheet = Drawing(720, 300, "How autograd gets a tensor that was not kept")
    steps = (
        (
            BLUE,
            "forward",
            "branch runs in ordinary autograd",
            "autograd asks to save a tensor",
            "it gets a handle: a number",
        ),
        (
            RED,
            "backward",
            "autograd asks for handle 7",
            "the step is undone, its branch runs again",
            "handle 7 is that run's tensor",
        ),
    )
    for row, (colour, name, *boxes) in enumerate(steps):
        y = 70 + 130 * row
        sheet.text(20, y - 32, name, anchor="start", colour=colour)
        for i, words in enumerate(boxes):
            x = 125 + 235 * i
            first, _, rest = _broken(words)
            sheet.shapes.append(
                f'<rect x="{x - 103}" y="{y - 20}" width="206" height="52" rx="6" fill="{PALE}" stroke="{colour}"/>'
            )
            sheet.text(x, y + 2 if rest else y + 11, first)
            if rest:
                sheet.text(x, y + 20, rest)
            if i:
                sheet.arrow((x - 132, y + 6), (x - 103, y + 6), colour=colour)
    words = "The graph that backward walks is the ordinary one: hooks, DDP and double backward see nothing new."
    sheet.text(20, 270, words, anchor="start", colour=GREY, size=13)
    return sheet


def _broken(words: str) -> tuple[str, str, str]:
    """Words on one line, or on two of about the same length."""
    if len(words) < 24:
        return words, "", ""
    spaces = [i for i, letter in enumerate(words) if letter == " "]
    cut = min(spaces, key=lambda i: abs(i - len(words) / 2))
    return words[:cut], " ", words[cut + 1 :]


DRAWINGS = {"block.svg": block, "memory.svg": memory, "replay.svg": replay}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
