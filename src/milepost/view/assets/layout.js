// The layout map: which rank and file holds which box of the picked tensor.

const MOST_BOXES = 6000;
const MOST_LISTED = 20_000;
const MOST_TICKS = 10;

const layout = {
  chart: null,
  list: null,
  rows: [],
  drawn: [],
  dims: [0, 1],
  fixed: [],
  key: null,
  shape: null,
  marked: -1,

  start() {
    this.chart = new Chart(byId("layout-map"), () => this.build());
    this.chart.made = (drawing) => drawing.on("click", (event) => this.pickBox(event.data?.row ?? -1));
    this.list = new VirtualList(byId("layout-boxes"), {
      columns: [
        { name: "written by", class: "num", width: "minmax(70px, 0.6fr)", cell: (row) => `rank ${row.rank}` },
        { name: "box", class: "key", width: "minmax(170px, 1.8fr)", cell: (row) => boxText(row.box) },
        { name: "size", class: "num", width: "minmax(70px, 0.6fr)", cell: (row) => bytes(row.bytes) },
        { name: "held by", class: "soft", width: "minmax(80px, 1fr)", cell: (row) => rankText(row.holders) },
        {
          name: "file",
          class: "key soft",
          width: "minmax(140px, 1fr)",
          cell: (row) => shortened(row.file.split("/").at(-1), 80),
          title: (row) => shortened(row.file, 400),
        },
      ],
      label: "Boxes of the tensor",
      same: (one, other) => one.number === other.number,
      onPick: (row) => this.pickBox(row.number),
      onActive: (row) => this.pickBox(row.number),
    });
    byId("layout-tensor").addEventListener("change", (event) => this.pickTyped(event.target.value));
    byId("layout-tensor").addEventListener("input", (event) => this.suggest(event.target.value));
    reads.start();
  },

  update() {
    const shape = view.data.shape(view.step);
    const hasTensors = Boolean(shape && shape.count);
    byId("layout-body").hidden = !hasTensors;
    byId("reads-card").hidden = !hasTensors;
    if (!hasTensors) {
      byId("layout-facts").replaceChildren(element("p", { class: "muted" }, "This step has no tensors in the page."));
      return;
    }
    if (view.key === null || !shape.index.has(view.key)) view.key = shape.tensor(largest(shape)).key;
    const isKnown = this.key === view.key && this.shape === shape;
    if (!isKnown) {
      this.setTensor(shape.tensor(shape.index.get(view.key)), shape);
      this.key = view.key;
      this.shape = shape;
    }
    if (document.activeElement !== byId("layout-tensor")) byId("layout-tensor").value = shortened(view.key, 4000);
    this.show({ keep: isKnown });
  },

  recolour() {
    if (this.tensor) this.showLegend();
  },

  pickTyped(text) {
    const shape = view.data.shape(view.step);
    const key = shape?.index.has(text) ? text : [...(shape?.index.keys() ?? [])].find((one) => shown(one) === text);
    if (key !== undefined && key !== view.key) pickTensor(key);
  },

  /** A few keys that contain what is typed; ten thousand options would make the browser slow. */
  suggest(text) {
    const wanted = text.toLowerCase();
    const found = [];
    for (const key of view.data.shape(view.step)?.index.keys() ?? []) {
      if (key.length < 1000 && key.toLowerCase().includes(wanted) && found.push(key) >= 40) break;
    }
    byId("layout-keys").replaceChildren(...found.map((key) => element("option", { value: shown(key) })));
    if (found.some((key) => shown(key) === text)) this.pickTyped(text);
  },

  setTensor(tensor, shape) {
    const isSameShape = this.tensor?.shape.join() === tensor.shape.join();
    this.tensor = tensor;
    if (!isSameShape) {
      const order = tensor.shape.map((n, d) => [n, d]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
      const largest_ = order.slice(0, 2).map(([, d]) => d);
      this.dims = largest_.length ? largest_.sort((a, b) => a - b) : [0];
      this.fixed = tensor.shape.map(() => 0);
    }
    this.marked = -1;
    const cut = shape.layouts[tensor.layout];
    const parts = cut ? savedParts(tensor, cut, MOST_LISTED) : [];
    this.rows = parts.map((part, i) => ({ ...part, number: i, bytes: elementsOf(part.box) * tensor.itemBytes }));
    const entry = (row) => entryName(tensor.stored, row.box, tensor.shape);
    // Of the step that is shown then.
    const file = (row) => ({ get: () => view.data.fileName(view.step, row.rank, entry(row)) });
    for (const row of this.rows) Object.defineProperty(row, "file", file(row));
    this.writers = [...new Set(parts.map((part) => part.rank))].sort((a, b) => a - b);
    this.place = new Map(this.writers.map((rank, i) => [rank, i]));
    this.showDims();
  },

  /** A colour for each rank that wrote: of the palette where they are few, else along a scale of hues. */
  colourOf(rank) {
    const at = this.place.get(rank) ?? 0;
    const tones = palette();
    if (this.writers.length <= tones.length) return tones[at];
    const isDark = document.documentElement.dataset.theme === "dark";
    const hue = (200 + (at * 300) / this.writers.length) % 360;
    return `hsl(${Math.round(hue)} ${isDark ? 34 : 42}% ${(isDark ? 42 : 64) + (at % 2 ? 4 : -4)}%)`;
  },

  /** `keep`: the same again, perhaps of another step, so that what is picked and where the tables stand stays. */
  show({ keep = false } = {}) {
    const { tensor } = this;
    const cut = view.data.layout(view.step, tensor);
    const boxes = cut ? boxCount(cut, tensor.shape) : 0;
    const count = Math.max(boxes, this.rows.length);
    byId("layout-facts").replaceChildren(
      facts([
        ["Shape", `${shapeText(tensor.shape)}, ${shown(tensor.dtype)}`],
        ["Size", bytes(tensor.bytes)],
        ["Cut", layoutText(cut, tensor)],
        ["Stored as", cut ? `${plural(count, "box", "boxes")} in ${plural(this.writers.length, "file")}` : ""],
        ["Of earlier saves", this.reusedText()],
        ["Tied to", shown(tensor.sameAs)],
      ]),
    );
    this.list.show(this.rows, { keep });
    reads.update({ keep });
    this.draw();
    this.showLegend();
    const cutOff = count > this.rows.length ? ` The first ${whole(this.rows.length)} boxes are listed.` : "";
    byId("layout-note").textContent = this.notes() + cutOff;
  },

  /** How many of the boxes lie in files of earlier saves, where that is known. */
  reusedText() {
    const { data, step } = view;
    if (!data.steps[step].reused) return "";
    const kept = this.rows.map((row) => [row, data.olderFiles(step, row.rank)]).filter(([, older]) => older);
    if (kept.some(([, older]) => !older.isKnown)) return "not known";
    const name = (row) => entryName(this.tensor.stored, row.box, this.tensor.shape);
    const found = kept.filter(([row, older]) => older.entries.has(name(row))).map(([row]) => row);
    if (!found.length) return "none";
    return `${plural(found.length, "box", "boxes")}, ${bytes(found.reduce((all, row) => all + row.bytes, 0))}`;
  },

  draw() {
    this.drawn = this.inPlane(this.rows).slice(0, MOST_BOXES);
    const isFlat = this.tensor.shape.length < 2;
    byId("layout-map").style.height = isFlat ? "130px" : "";
    this.chart.draw();
  },

  notes() {
    const more = this.inPlane(this.rows).length - this.drawn.length;
    const hints = ["Pick a box, in the map or in the table, to see it in both. Ctrl and the wheel zoom."];
    if (more > 0) hints.push(`${whole(more)} more boxes are in the table only.`);
    return this.rows.length ? hints.join(" ") : "";
  },

  showLegend() {
    const { writers } = this;
    const parts = [];
    if (writers.length > palette().length) {
      const stops = Array.from({ length: 13 }, (_, i) =>
        this.colourOf(writers[2 * Math.floor((i * (writers.length - 1)) / 24)]),
      );
      const strip = element("i", { class: "strip", "aria-hidden": "true" });
      strip.style.background = `linear-gradient(to right, ${stops.join(",")})`;
      parts.push(legendEntry(`rank ${writers[0]}`, strip, `rank ${writers[writers.length - 1]}`));
    } else parts.push(...writers.map((rank) => legendEntry(swatch(this.colourOf(rank)), `rank ${rank}`)));
    if (reads.overlay().length) parts.push(legendEntry(element("i", { class: "dashed" }), "what new ranks hold"));
    byId("layout-legend").replaceChildren(...parts);
  },

  /** The boxes that the drawn plane meets: those that hold the fixed index of every other dimension. */
  inPlane(rows) {
    const others = this.tensor.shape.map((_, d) => d).filter((d) => !this.dims.includes(d));
    return rows.filter(({ box }) =>
      others.every((d) => box.offset[d] <= this.fixed[d] && this.fixed[d] < box.offset[d] + box.shape[d]),
    );
  },

  showDims() {
    const host = byId("layout-dims");
    const { shape } = this.tensor;
    host.hidden = shape.length < 3;
    if (host.hidden) return host.replaceChildren();
    const others = shape.map((_, d) => d).filter((d) => !this.dims.includes(d));
    // More than a few sliders would not help: the others stay at 0.
    const fixed = others.filter((d) => shape[d] > 1).slice(0, 6);
    return host.replaceChildren(this.dimPick(0, "down"), this.dimPick(1, "across"), ...fixed.map((d) => this.slot(d)));
  },

  dimPick(which, name) {
    const options = this.tensor.shape.map((n, d) => element("option", { value: d }, `dim ${d} (${whole(n)})`));
    const select = element("select", { id: `layout-dim-${which}` }, options);
    select.value = this.dims[which];
    select.addEventListener("change", () => {
      const chosen = Number(select.value);
      if (this.dims[1 - which] === chosen) this.dims[1 - which] = this.dims[which];
      this.dims[which] = chosen;
      this.showDims();
      this.show();
      byId(select.id).focus();
    });
    return element("label", { class: "field" }, element("span", { class: "field-name" }, name), select);
  },

  slot(d) {
    const most = Math.max(0, this.tensor.shape[d] - 1);
    const input = element("input", { type: "number", min: 0, max: most, value: this.fixed[d] });
    input.addEventListener("input", () => {
      this.fixed[d] = Math.max(0, Math.min(most, Math.floor(Number(input.value) || 0)));
      this.draw();
    });
    return element("label", { class: "field" }, element("span", { class: "field-name" }, `dim ${d} at`), input);
  },

  /** The dimension that goes down and the one that goes across; undefined where there is none. */
  get axes() {
    const { shape } = this.tensor;
    if (shape.length < 2) return [undefined, shape.length ? 0 : undefined];
    return this.dims;
  },

  /** The two sides of a box in the drawing: [left, right, top, bottom]. */
  sides(box) {
    const [down, across] = this.axes;
    const side = (d) => (d === undefined ? [0, 1] : [box.offset[d], box.offset[d] + box.shape[d]]);
    return [...side(across), ...side(down)];
  },

  /** Draw again, with the plane moved to where a box of the new mesh is. */
  showPiece(box) {
    const seen = box && this.inPlane([{ box }]).length;
    if (box && !seen) {
      this.fixed = box.offset.map((start, d) => (this.dims.includes(d) ? this.fixed[d] : start));
      this.showDims();
    }
    this.draw();
  },

  pickBox(number_) {
    const row = this.rows[number_];
    if (!row) return;
    this.marked = number_;
    this.list.pick(row);
    this.chart.draw();
    announce(`Box ${boxText(row.box)}, written by rank ${row.rank}, ${bytes(row.bytes)}, file ${shown(row.file)}`);
  },

  build() {
    return layoutMap(this);
  },
};
panels.layout = layout;

function largest(shape) {
  let best = 0;
  for (let i = 1; i < shape.count; i += 1) if (shape.sizes[i] > shape.sizes[best]) best = i;
  return best;
}
