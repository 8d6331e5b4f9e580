// Charts. The library is loaded when the first chart becomes visible, so that nothing else waits for it.
//
// The library interprets tags in texts, so it never gets untrusted ones: only numbers and fixed words.

let loading = null;

function load() {
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    const withStyles = withoutStyles();
    script.src = new URL(document.body.dataset.charts, document.baseURI);
    script.onload = () => done(window.Plotly);
    script.onerror = () => failed(new Error("The charts could not be loaded; reload the page."));
    script.addEventListener("load", withStyles);
    script.addEventListener("error", withStyles);
    document.head.append(script);
  });
  return loading;
}

/** Wait until the page is idle, at most a second. */
function quiet() {
  return new Promise((done) =>
    window.requestIdleCallback ? requestIdleCallback(done, { timeout: 1000 }) : setTimeout(done, 200),
  );
}

/** Suppress new style elements until the returned function is called. The library creates one for maps, which are not
 * used here, and the page's policy forbids inline style sheets. */
function withoutStyles() {
  const create = document.createElement;
  document.createElement = (name, ...rest) => create.call(document, name === "style" ? "template" : name, ...rest);
  return () => {
    document.createElement = create;
  };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const FEW = 8; // with fewer whole numbers the library would also label halves, because it draws up to ten labels

/** Return the settings for an axis of whole numbers, whose labels must be whole too. */
function whole(lines) {
  const values = lines.flatMap((line) => line.x);
  const few = Math.max(...values) - Math.min(...values) < FEW;
  return { rangemode: "nonnegative", ...(few ? { dtick: 1, tick0: 0 } : {}) };
}

function layout({ x, y, log, counts }, lines) {
  const axis = {
    color: colour("quiet"),
    gridcolor: colour("line"),
    zeroline: false,
    linecolor: colour("line"),
    automargin: true,
  };
  const title = (text) => ({ text, font: { size: 12 }, standoff: 8 });
  return {
    autosize: true,
    margin: { l: 8, r: 12, t: 8, b: 8 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("text") } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
    dragmode: false,
    xaxis: { ...axis, title: title(x), showgrid: false, ...(counts ? whole(lines) : {}) },
    yaxis: {
      ...axis,
      title: title(y),
      type: log ? "log" : "linear",
      ...(log ? { dtick: 1, exponentformat: "SI", ticksuffix: "B" } : {}),
    },
  };
}

/** Return a chart: an element, and `draw(lines, axes)` for lines of { name, x, y, colour, dash, hover }. `axes.counts`:
 * x has whole numbers. */
export function chart() {
  const element = document.createElement("div");
  element.className = "chart";
  element.hidden = true;
  let wanted = null;
  let drawn = null;
  let seen = false;

  async function redraw() {
    if (!seen || element.hidden) return; // text comes first
    const asked = JSON.stringify(wanted);
    if (asked === drawn) return;
    drawn = asked;
    try {
      if (!loading) await quiet();
      const Plotly = await load();
      const { lines, axes } = wanted;
      const traces = lines.map((line) => ({
        type: "scatter",
        mode: line.x.length < 40 ? "lines+markers" : "lines",
        name: line.name,
        x: line.x,
        y: line.y,
        connectgaps: true,
        line: { color: colour(line.colour), width: 2, dash: line.dash ?? "solid" },
        marker: { size: 5 },
        hovertemplate: line.hover,
        customdata: line.labels,
      }));
      await Plotly.react(element, traces, layout(axes, lines), { displayModeBar: false, responsive: true });
    } catch (error) {
      element.textContent = error.message;
    }
  }

  new IntersectionObserver(
    (entries) => {
      seen ||= entries.some((each) => each.isIntersecting);
      redraw();
    },
    { rootMargin: "200px" },
  ).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawn = null;
    redraw();
  });

  return {
    element,
    draw(lines, axes) {
      wanted = { lines, axes };
      element.hidden = !lines.some((line) => line.x.length);
      redraw();
    },
  };
}
