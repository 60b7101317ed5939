// Charts: ECharts with the page's colours, sized to its place, drawn again when the theme changes.

const charts = new Set();

const colours_ = new Map();

/** A colour of the theme, by its name in the style sheet. */
function colour(name) {
  let found = colours_.get(name);
  if (found === undefined) {
    found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    colours_.set(name, found);
  }
  return found;
}

function forgetColours() {
  colours_.clear();
}

const palette = () => Array.from({ length: 8 }, (_, i) => colour(`c${i}`));
const still = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

class Chart {
  /** `build()` gives the options; it runs again for every `draw`. */
  constructor(host, build) {
    this.host = host;
    this.build = build;
    this.drawing = null;
    this.width = 0;
    this.height = 0;
    this.isOwed = false;
    charts.add(this);
    new ResizeObserver(() => this.fit()).observe(host);
  }

  /** Draw now; or, in a part of the page that is hidden, when that is shown. */
  draw() {
    this.isOwed = !this.host.clientWidth || !this.host.clientHeight;
    if (this.isOwed) return;
    const isFirst = !this.drawing;
    const isSized = this.width === this.host.clientWidth && this.height === this.host.clientHeight;
    this.width = this.host.clientWidth;
    this.height = this.host.clientHeight;
    const option = this.build();
    if (isFirst) this.drawing = echarts.init(this.host, null, { renderer: "canvas" });
    else if (!isSized) this.drawing.resize({ silent: true });
    this.drawing.setOption({ ...common(), ...option }, { notMerge: true });
    if (isFirst) this.made?.(this.drawing);
    this.drew?.();
  }

  /** Fit the drawing to its place, which may have come into sight; what is drawn may change with it. */
  fit() {
    const isSized = this.width === this.host.clientWidth && this.height === this.host.clientHeight;
    if (this.host.clientWidth && (this.isOwed || (this.drawing && !isSized))) this.draw();
  }

  get isNarrow() {
    return this.host.clientWidth < 560;
  }
}

function common() {
  return {
    backgroundColor: "transparent",
    animation: !still(),
    animationDuration: 250,
    animationDurationUpdate: 200,
    textStyle: { fontFamily: colour("sans"), color: colour("text") },
    color: palette(),
  };
}

function tooltip(content) {
  return {
    confine: true,
    backgroundColor: colour("card"),
    borderColor: colour("line-strong"),
    borderWidth: 1,
    padding: [8, 12],
    textStyle: { color: colour("text"), fontSize: 13 },
    transitionDuration: 0,
    formatter: content,
  };
}

/** The content of a tooltip: a title and rows of name and value. */
function tip(title, rows) {
  const made = element("div", { class: "tip" }, element("strong", {}, title));
  for (const [name, value] of rows) {
    made.append(element("div", { class: "row" }, element("span", {}, name), element("span", {}, value)));
  }
  return made;
}

/** A grid that stays where it is put, so that several of them line up. */
function gridAt(place) {
  return { outerBoundsMode: "none", ...place };
}

function axis(about = {}) {
  const { axisLabel, splitLine, ...rest } = about;
  return {
    axisLine: { lineStyle: { color: colour("line-strong") } },
    axisTick: { show: false },
    axisLabel: { color: colour("soft"), fontSize: 11, hideOverlap: true, ...axisLabel },
    splitLine: { lineStyle: { color: colour("line") }, ...splitLine },
    nameTextStyle: { color: colour("soft"), fontSize: 11 },
    containShape: false,
    ...rest,
  };
}

/** A line at the picked step. */
function markAt(x) {
  return {
    silent: true,
    symbol: "none",
    animation: false,
    label: { show: false },
    lineStyle: { color: colour("accent"), type: "solid", width: 1.5, opacity: 0.75 },
    data: x === null ? [] : [{ xAxis: x }],
  };
}

/** A formatter for the numbers of an axis that shows as many digits as tell its values apart. */
function digitsFor(values) {
  const found = values.filter((value) => Number.isFinite(value));
  const most = Math.max(0, ...found.map(Math.abs));
  const range = found.length ? Math.max(...found) - Math.min(...found) : 0;
  const needed = range > 0 ? Math.ceil(Math.log10(most / range)) + 2 : 3;
  const digits = Math.max(3, Math.min(9, needed));
  return (value) => number(value, digits);
}

function swatch(colour_) {
  const made = element("i", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour_;
  return made;
}

function legendEntry(mark, ...text) {
  return element("span", {}, mark, ...text);
}

const inks = new Map();

/** Black or white: what can be read on a colour such as `#4477aa` or `rgb(68, 119, 170)`. */
function inkOn(fill) {
  let ink = inks.get(fill);
  if (ink) return ink;
  const parts = fill.startsWith("#")
    ? [1, 3, 5].map((i) => parseInt(fill.slice(i, i + 2), 16))
    : (fill.match(/[\d.]+/g) ?? [0, 0, 0]).slice(0, 3).map(Number);
  const [r, g, b] = parts.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  ink = 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10161d" : "#ffffff";
  inks.set(fill, ink);
  return ink;
}

/** A colour between two, of `rgb()` and `#` colours. */
function blend(one, other, share) {
  const parts = (text) => [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16));
  const [a, b] = [parts(one), parts(other)];
  return `rgb(${a.map((value, k) => Math.round(value + (b[k] - value) * share)).join(",")})`;
}

/** A colour of a scale of `#` colours, for a share from 0 to 1. */
function heat(scale, share) {
  const at = Math.max(0, Math.min(1, share)) * (scale.length - 1);
  const i = Math.min(scale.length - 2, Math.floor(at));
  return blend(scale[i], scale[i + 1], at - i);
}
