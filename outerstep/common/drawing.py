"""A drawing as SVG: boxes, text and arrows on an opaque background, readable on light and dark pages."""

from html import escape

INK, QUIET, LINE, GROUND = "#1b2130", "#636c7e", "#b7bfcd", "#ffffff"
TRAIN, UP, DOWN, MEAN = "#4a67e0", "#e0a11b", "#0d8a72", "#8f7ad6"
FONT = "font-family='system-ui, sans-serif'"


class Drawing:
    """Coordinates are in pixels from the upper left corner. `says` describes the drawing for screen readers."""

    def __init__(self, width: float, height: float, says: str) -> None:
        self._says = says
        self._size = f"{width:g} {height:g}"
        self._parts = [f"<rect width='{width:g}' height='{height:g}' rx='8' fill='{GROUND}'/>"]

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "none") -> None:
        shape = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' rx='3'"
        self._parts.append(f"<rect {shape} fill='{fill}' stroke='{line}'/>")

    def words(self, x: float, y: float, text: str, *, ink: str = INK, size: int = 13, at: str = "start") -> None:
        place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{at}'"
        self._parts.append(f"<text {place} fill='{ink}' font-size='{size}' {FONT}>{escape(text)}</text>")

    def line(self, *points: tuple[float, float], ink: str = LINE, dashed: bool = False) -> None:
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = " stroke-dasharray='3 3'" if dashed else ""
        self._parts.append(f"<polyline points='{way}' fill='none' stroke='{ink}'{dashes}/>")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line with an arrowhead at its end; the last segment is horizontal or vertical."""
        self.line(*points, ink=QUIET)
        (x0, y0), (x, y) = points[-2:]
        along_x, along_y = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back_x, back_y = x - 8 * along_x, y - 8 * along_y
        sides = [(back_x + 4 * along_y, back_y + 4 * along_x), (back_x - 4 * along_y, back_y - 4 * along_x)]
        head = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *sides])
        self._parts.append(f"<polygon points='{head}' fill='{QUIET}'/>")

    def svg(self) -> str:
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self._size}' role='img'>"
        return "\n".join([head, f"<title>{escape(self._says)}</title>", *self._parts, "</svg>\n"])
