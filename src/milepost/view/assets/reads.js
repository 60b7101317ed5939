// Loading on another mesh: what each new rank would read, and from which files.

const MOST_CELLS = 96;

const reads = {
  list: null,
  chart: null,
  mesh: [2],
  cuts: [{ dim: 0, stride: 1 }],
  plans: [],
  isAll: false,
  turn: 0,
  chosen: -1,

  start() {
    this.list = new VirtualList(byId("reads-table"), {
      columns: this.columns(),
      label: "What each new rank reads",
      same: (one, other) => one.rank === other.rank,
      onPick: (row) => this.pick(row),
      onActive: (row) => this.pick(row),
    });
    this.chart = new Chart(byId("reads-chart"), () => this.build());
    byId("mesh-shape").addEventListener("input", (event) => {
      this.mesh = event.target.value
        .trim()
        .split(/[x×*,\s]+/)
        .map((size) => (/^[0-9]{1,6}$/.test(size) ? Number(size) : NaN));
      this.guessCuts();
      this.showCuts();
      this.update();
    });
    byId("reads-scope").addEventListener("change", (event) => {
      this.isAll = event.target.value === "all";
      this.list.setColumns(this.columns());
      this.update();
    });
    byId("mesh-overlay").addEventListener("change", () => {
      layout.draw();
      layout.showLegend();
    });
  },

  columns() {
    const local = {
      name: "local shape",
      class: "num soft",
      width: "minmax(90px, 1fr)",
      cell: (row) => localShape(row),
    };
    const pieces = { name: "pieces", class: "num soft", width: "minmax(70px, 0.7fr)", cell: (row) => whole(row.count) };
    return [
      { name: "new rank", class: "num", width: "minmax(64px, 0.5fr)", cell: (row) => String(row.rank) },
      this.isAll ? pieces : local,
      { name: "reads", class: "num", width: "minmax(70px, 0.7fr)", cell: (row) => bytes(row.bytes) },
      {
        name: "from the files of ranks",
        class: "soft",
        width: "minmax(110px, 1.4fr)",
        cell: (row) => rankText(sourcesOf(row)) || "–",
      },
    ];
  },

  /** A new axis cuts the next dimension that is not cut yet. */
  guessCuts() {
    const cuts = this.cuts.slice(0, this.mesh.length);
    while (cuts.length < this.mesh.length) {
      const free = layout.tensor.shape.map((_, d) => d).find((d) => !cuts.some((cut) => cut?.dim === d));
      cuts.push(free === undefined ? null : { dim: free, stride: 1 });
    }
    this.cuts = cuts;
  },

  /** What the axes do to the picked tensor: one that would cut a dimension that it does not have copies. */
  fitting() {
    const dims = layout.tensor.shape.length;
    return this.cuts.map((cut) => (cut && cut.dim < dims ? cut : null));
  },

  showCuts() {
    byId("mesh-cuts").dataset.dims = layout.tensor.shape.length;
    byId("mesh-cuts").replaceChildren(...this.mesh.slice(0, 6).map((size, axis_) => this.cutPick(size, axis_)));
  },

  cutPick(size, axis_) {
    const options = layout.tensor.shape.map((n, d) => element("option", { value: d }, `cuts dim ${d}`));
    const about = { id: `mesh-cut-${axis_}`, "aria-label": `What axis ${axis_} of the mesh does` };
    const select = element("select", about, element("option", { value: "copy" }, "copies"), options.slice(0, 64));
    const cut = this.fitting()[axis_];
    select.value = cut ? String(cut.dim) : "copy";
    select.addEventListener("change", () => {
      this.cuts[axis_] = select.value === "copy" ? null : { dim: Number(select.value), stride: 1 };
      this.showCuts();
      this.update();
      byId(select.id).focus();
    });
    const name = Number.isInteger(size) ? `axis ${axis_} (${whole(size)})` : `axis ${axis_}`;
    return element(
      "span",
      { class: "field" },
      element("span", { class: "field-name" }, name),
      select,
      this.stride(axis_),
    );
  },

  stride(axis_) {
    const cut = this.fitting()[axis_];
    if (!cut) return null;
    const about = { type: "number", min: 1, max: 65536, value: cut.stride, id: `mesh-stride-${axis_}` };
    const input = element("input", {
      ...about,
      class: "short",
      "aria-label": `Stride of axis ${axis_}`,
      title: "stride",
    });
    input.addEventListener("input", () => {
      const stride = Math.max(1, Math.min(65536, Math.floor(Number(input.value) || 1)));
      this.cuts[axis_] = { ...this.cuts[axis_], stride };
      this.update();
    });
    return input;
  },

  update({ keep = false } = {}) {
    this.guessCuts();
    if (byId("mesh-cuts").dataset.dims !== String(layout.tensor.shape.length)) this.showCuts();
    this.turn += 1;
    if (!keep) this.chosen = -1;
    try {
      if (this.isAll) whileBusy(() => this.workOut(this.turn));
      else {
        const saved = view.data.layout(view.step, layout.tensor);
        if (!saved) throw new Error("The layout of this tensor is not in the page.");
        this.shows(explainTensor(layout.tensor, saved, gridOf(this.mesh, this.fitting(), layout.tensor.shape.length)));
      }
    } catch (error) {
      this.shows([], error.message);
    }
  },

  /** All tensors, some at a time; given up as soon as something else is asked. */
  async workOut(turn) {
    const shape = view.data.shape(view.step);
    try {
      gridOf(this.mesh, [], 0);
      const work = explainAll(shape, this.mesh, this.cuts);
      for (;;) {
        const until = performance.now() + 24;
        let one = work.next();
        while (!one.done && performance.now() < until) one = work.next();
        if (turn !== this.turn) return;
        if (one.done) return this.shows(one.value);
        byId("reads-summary").replaceChildren(
          element("p", { class: "muted" }, `Working it out: ${whole(one.value)} of ${plural(shape.count, "tensor")} …`),
        );
        await new Promise((go) => setTimeout(go));
      }
    } catch (error) {
      if (turn === this.turn) this.shows([], error.message);
    }
  },

  shows(plans, problem = "") {
    this.plans = plans;
    byId("mesh-problem").textContent = problem;
    byId("reads-body").hidden = !plans.length;
    const chosen = plans.find((plan) => plan.rank === this.chosen) ?? null;
    this.list.picked = chosen;
    this.list.show(plans, { keep: chosen !== null });
    this.showDetail(chosen);
    this.showSummary();
    const shown_ = Math.min(MOST_CELLS, plans.length);
    byId("reads-chart").style.height = `${Math.max(160, Math.min(440, 70 + 30 * shown_))}px`;
    this.chart.draw();
    if (layout.chart.drawing) {
      layout.draw();
      layout.showLegend();
    }
  },

  showSummary() {
    const host = byId("reads-summary");
    if (!this.plans.length) return host.replaceChildren();
    const of = this.isAll ? view.data.shape(view.step).sizes.reduce((all, n) => all + n, 0) : layout.tensor.bytes;
    const total = this.plans.reduce((all, plan) => all + plan.bytes, 0);
    const most = this.plans.reduce((best, plan) => (plan.bytes > best.bytes ? plan : best));
    const files = this.plans.map((plan) => sourcesOf(plan).length);
    const few = files.reduce((a, b) => Math.min(a, b));
    const many = files.reduce((a, b) => Math.max(a, b));
    const what = this.isAll ? "all tensors" : "the tensor";
    return host.replaceChildren(
      facts([
        ["New ranks", whole(this.plans.length)],
        ["Read in all", `${bytes(total)}${of ? `, ${(total / of).toFixed(2)} × ${what}` : ""}`],
        ["Most", `${bytes(most.bytes)} by rank ${most.rank}`],
        ["Files that a rank opens", few === many ? whole(few) : `${whole(few)} to ${whole(many)}`],
      ]),
    );
  },

  pick(row) {
    this.chosen = row.rank;
    this.list.pick(row);
    if (!this.isAll) layout.showPiece(row.pieces[0]?.box);
    this.showDetail(row);
    announce(`Rank ${row.rank} reads ${bytes(row.bytes)} from ${plural(sourcesOf(row).length, "file")}`);
  },

  showDetail(row) {
    const label = `Reads of rank ${row?.rank}`;
    const parts = row && (this.isAll ? this.byFile(row, label) : this.byBox(row, label));
    byId("reads-detail").replaceChildren(...(parts ?? []));
  },

  byBox(row, label) {
    const rows = row.reads
      .slice(0, 100)
      .map((read) => [
        shown(view.data.fileName(view.step, read.rank, read.name)),
        boxText(read.box),
        boxText(read.source),
        bytes(read.bytes),
      ]);
    const more = row.reads.length > 100 ? `, the first 100 of ${whole(row.reads.length)}` : "";
    const heads = ["file", "box that is read", "of the stored box", "bytes"];
    return [
      element("h4", {}, `What rank ${row.rank} reads${more}`),
      scrollTable(label, heads, rows, ["mono", "mono", "mono", "num"]),
    ];
  },

  byFile(row, label) {
    const sources = [...row.sources].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    const { data, step } = view;
    const name = (rank) => (data.steps[step].reused ? `files of rank ${rank}` : shown(data.fileName(step, rank)));
    const rows = sources.slice(0, 100).map(([rank, size]) => [name(rank), bytes(size)]);
    const more = sources.length > 100 ? `, the first 100 of ${whole(sources.length)} files` : "";
    return [
      element("h4", {}, `What rank ${row.rank} reads${more}`),
      scrollTable(label, ["file", "bytes"], rows, ["mono", "num"]),
    ];
  },

  /** The boxes of the new mesh, for the map; none where there are too many to see. */
  overlay() {
    if (!byId("mesh-overlay").checked || this.isAll || this.plans.length > 2048) return [];
    const seen = new Set();
    const boxes = [];
    for (const plan of this.plans) {
      const isChosen = plan.rank === this.chosen;
      for (const { box } of layout.inPlane(plan.pieces)) {
        const name = box.offset.join();
        if (seen.has(name) && !isChosen) continue;
        seen.add(name);
        boxes.push({ box, isChosen });
      }
    }
    return boxes.length > 4096 ? [] : boxes;
  },

  build() {
    return readsMap(this.plans);
  },
};

/** [rank that saved, bytes] for each file that a plan reads from. */
function sourcePairs(plan) {
  if (plan.sources) return [...plan.sources];
  const found = new Map();
  for (const read of plan.reads) found.set(read.rank, (found.get(read.rank) ?? 0) + read.bytes);
  return [...found];
}

function sourcesOf(plan) {
  return [...new Set(plan.sources ? plan.sources.keys() : plan.reads.map((read) => read.rank))].sort((a, b) => a - b);
}

function localShape(plan) {
  if (!plan.pieces?.length) return "nothing";
  const ends = plan.pieces[0].box.shape.map((_, d) =>
    Math.max(...plan.pieces.map(({ at, box }) => at[d] + box.shape[d])),
  );
  return shapeText(ends);
}

/** A map of bytes: new ranks down, the files of the ranks that saved across. Many ranks share a cell. */
function readsMap(plans) {
  const pairs = plans.map(sourcePairs);
  const writers = [...new Set(pairs.flatMap((found) => found.map(([rank]) => rank)))].sort((a, b) => a - b);
  const rows = Math.min(MOST_CELLS, plans.length);
  const columns = Math.min(MOST_CELLS, writers.length);
  const at = new Map(writers.map((rank, i) => [rank, Math.floor((i * columns) / writers.length)]));
  const cells = new Map();
  pairs.forEach((found, i) => {
    const y = Math.floor((i * rows) / plans.length);
    for (const [rank, size] of found) {
      const name = y * columns + at.get(rank);
      cells.set(name, (cells.get(name) ?? 0) + size);
    }
  });
  const data = [...cells].map(([name, size]) => [name % columns, Math.floor(name / columns), size]);
  const most = data.reduce((all, [, , size]) => Math.max(all, size), 1);
  const group = (list, count) => (i) => {
    const first = list[Math.ceil((i * list.length) / count)];
    const last = list[Math.ceil(((i + 1) * list.length) / count) - 1];
    return first === last ? `${first}` : `${first}–${last}`;
  };
  const ranks = group(
    plans.map((plan) => plan.rank),
    rows,
  );
  const saved = group(writers, columns);
  const names = (n, name) => Array.from({ length: n }, (_, i) => name(i));
  const label = { show: columns <= 8 && rows <= 14, formatter: ({ value }) => bytes(value[2]), fontSize: 11 };
  const [light, dark] = [colour("accent-soft"), colour("accent")];
  const ink = (size) => inkOn(blend(light, dark, size / most));
  const about = { type: "category", splitLine: { show: false }, nameLocation: "middle" };
  return {
    grid: gridAt({ left: 74, right: 12, top: 44, bottom: 10 }),
    xAxis: axis({ ...about, data: names(columns, saved), position: "top", name: "file of rank", nameGap: 24 }),
    yAxis: axis({ ...about, data: names(rows, ranks), inverse: true, name: "new rank", nameGap: 56 }),
    visualMap: { show: false, min: 0, max: most, inRange: { color: [light, dark] } },
    tooltip: tooltip(({ value: [x, y, size] }) =>
      tip(`Rank ${ranks(y)} from the file of rank ${saved(x)}`, [["bytes", bytes(size)]]),
    ),
    series: [
      {
        type: "heatmap",
        data: data.map((value) => ({ value, label: { color: label.show ? ink(value[2]) : undefined } })),
        label,
        itemStyle: { borderColor: colour("card"), borderWidth: rows > 48 || columns > 48 ? 0 : 1 },
        progressive: 0,
      },
    ],
  };
}
