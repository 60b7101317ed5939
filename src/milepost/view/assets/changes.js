// What changed between two steps: keys, shapes, values, and how much of each tensor, over the tree.

const MEASURES = {
  blocks: "blocks that changed",
  rms: "change of rms",
  mean: "change of mean",
  shape: "keys and shapes",
};
const MOST_VALUES = 200;

const changes = {
  from: -1,
  to: -1,
  measure: "",
  preferred: "blocks",
  map: null,
  list: null,
  rows: [],
  byKey: new Map(),
  most: 1,
  drawn: "",
  turn: 0,

  start() {
    this.list = new VirtualList(byId("changes-table"), {
      columns: [
        {
          name: "tensor",
          class: "key",
          width: "minmax(160px, 3fr)",
          cell: (row) => keyCell(row.key),
          title: (row) => shortened(row.key, 400),
        },
        { name: "what", class: "soft", width: "minmax(84px, 0.8fr)", cell: (row) => row.what },
        { name: "change", class: "num", width: "minmax(66px, 0.6fr)", cell: (row) => percent(row.share) },
        { name: "", label: "as a bar", width: "minmax(60px, 1fr)", cell: (row) => changeBar(row.share / this.most) },
        { name: "size", class: "num", width: "minmax(70px, 0.6fr)", cell: (row) => bytes(row.bytes) },
      ],
      label: "Tensors, those that changed most first",
      same: (one, other) => one.key === other.key,
      onPick: (row) => pickTensor(row.key),
    });
    this.map = new TreeMap(byId("changes-map"), byId("changes-path"), {
      fill: (node) => this.fill(node),
      tip: (node) => this.tip(node),
      pick: (node) => pickTensor(this.map.shape.record.tensors.keys[this.map.shape.leaf(node)]),
    });
    for (const side of ["from", "to"]) {
      byId(`changes-${side}`).addEventListener("change", (event) => {
        this[side] = Number(event.target.value);
        whileBusy(() => this.show());
      });
    }
    byId("changes-measure").addEventListener("change", (event) => {
      this.preferred = event.target.value;
      whileBusy(() => this.show());
    });
    this.fillPicks();
    this.pickPair();
  },

  fillPicks() {
    for (const side of ["from", "to"]) fillSteps(byId(`changes-${side}`));
  },

  /** First the newest pair of steps whose blocks were compared, else the last two steps. */
  pickPair() {
    const { record, usable } = view.data;
    const [known] = [...record.changes].sort((a, b) => b.after - a.after || b.before - a.before);
    if (known) [this.from, this.to] = [known.before, known.after];
    else [this.from, this.to] = [usable.at(-2) ?? usable[0] ?? 0, usable.at(-1) ?? 0];
  },

  update() {
    if (view.key !== null) this.list.pick({ key: view.key }, { scroll: false });
    return this.drawn === this.wanted() ? undefined : this.show({ keep: true });
  },

  wanted() {
    return [view.data.number, this.from, this.to, this.preferred].join();
  },

  change() {
    return view.data.changeOf(this.from, this.to) ?? view.data.changeOf(this.to, this.from);
  },

  measures() {
    const { data } = view;
    const found = this.change() ? ["blocks"] : [];
    if (data.statisticsOf(this.from) && data.statisticsOf(this.to)) found.push("rms", "mean");
    return [...found, "shape"];
  },

  async show({ keep = false } = {}) {
    const { data } = view;
    this.turn += 1;
    const { turn } = this;
    byId("changes-from").value = this.from;
    byId("changes-to").value = this.to;
    byId("changes-measure").dataset.shown = "";
    const known = this.measures();
    this.measure = known.includes(this.preferred) ? this.preferred : known[0];
    const select = byId("changes-measure");
    select.replaceChildren(...known.map((name) => element("option", { value: name }, MEASURES[name])));
    select.value = this.measure;
    const before = data.shape(this.from);
    const after = data.shape(this.to);
    const shares = before && after ? await this.measured() : null;
    if (turn !== this.turn) return; // another pair was picked meanwhile
    this.drawn = this.wanted();
    this.rows = shares ? this.compare(before, after, shares) : [];
    this.byKey = new Map(this.rows.map((row) => [row.key, row]));
    this.rows.sort((a, b) => rankOf(b) - rankOf(a) || b.bytes - a.bytes);
    this.most = this.scale();
    this.addUp(after);
    this.list.show(this.rows, { keep });
    this.showSummary();
    this.showValues();
    if (after) this.map.show(after);
    this.showLegend();
    this.list.pick({ key: view.key }, { scroll: false });
    select.dataset.shown = this.measure;
  },

  compare(before, after, share) {
    const rows = [];
    for (const [key, i] of after.index) {
      const tensor = after.tensor(i);
      const j = before.index.get(key);
      const row = { key, bytes: tensor.bytes, share: NaN, what: "added" };
      if (j !== undefined) {
        const old = before.tensor(j);
        if (old.dtype !== tensor.dtype) row.what = "other dtype";
        else if (old.shape.join() !== tensor.shape.join()) row.what = "other shape";
        else this.measureRow(row, share(j, i));
      }
      rows.push(row);
    }
    for (const [key, j] of before.index)
      if (!after.index.has(key)) rows.push({ key, what: "removed", share: NaN, bytes: before.sizes[j] });
    return rows;
  },

  measureRow(row, share) {
    row.share = share;
    if (Number.isNaN(share)) row.what = this.measure === "shape" ? "in both" : "not known";
    else row.what = share ? "changed" : "same";
  },

  /** A function from the numbers of a tensor in both steps to how much of it changed: 0..1, or NaN. */
  async measured() {
    const { data } = view;
    if (this.measure === "shape") return () => NaN;
    if (this.measure === "blocks") {
      const change = this.change();
      const flipped = change.before !== this.from;
      const column = await data.blob("changes");
      return (j, i) => {
        const byte = column[change.at + (flipped ? j : i)];
        return byte === 255 ? NaN : byte / 254;
      };
    }
    const [one, other] = [await data.statistics(this.from), await data.statistics(this.to)];
    const number_ = COLUMNS.indexOf(this.measure);
    return (j, i) => {
      const [a, b] = [one.read(number_, j), other.read(number_, i)];
      const scale =
        this.measure === "mean" ? Math.max(one.read(3, j), other.read(3, i)) : Math.max(Math.abs(a), Math.abs(b));
      return scale ? Math.min(1, Math.abs(b - a) / scale) : a === b ? 0 : NaN;
    };
  },

  /** For each node of the tree: the bytes below it whose change is known, and how many of them changed. */
  addUp(shape) {
    if (!shape) return;
    const count = shape.record.tree.depth.length;
    this.known = new Float64Array(count);
    this.changed = new Float64Array(count);
    this.added = new Float64Array(count);
    for (let node = count - 1; node >= 0; node -= 1) {
      if (shape.isLeaf(node) && shape.bytes[node] > 0) {
        const row = this.byKey.get(shape.record.tensors.keys[shape.leaf(node)]);
        if (row && !Number.isNaN(row.share)) {
          this.known[node] = row.bytes;
          this.changed[node] = row.bytes * row.share;
        } else if (row && row.what !== "not known" && row.what !== "in both") this.added[node] = row.bytes;
      }
      const parent = shape.parent[node];
      if (parent < 0) continue;
      this.known[parent] += this.known[node];
      this.changed[parent] += this.changed[node];
      this.added[parent] += this.added[node];
    }
  },

  /** The same pair of steps in newer data; the newest pair if that was the one before. */
  renew(old) {
    const was = [this.from, this.to].map((i) => old.steps[i]?.name);
    const [from, to] = was.map((name) => view.data.steps.findIndex((step) => step.name === name));
    const wasNewest = this.to === newestShown(old);
    this.fillPicks();
    if (from < 0 || to < 0 || (wasNewest && view.follows)) this.pickPair();
    else [this.from, this.to] = [from, to];
  },

  recolour() {
    this.showLegend();
  },

  fill(node) {
    if (this.added[node] > this.known[node]) return colour("c1");
    if (!this.known[node]) return colour("unknown");
    const heats = [0, 1, 2, 3].map((i) => colour(`heat-${i}`));
    return heat(heats, Math.sqrt(this.changed[node] / this.known[node] / this.most));
  },

  tip(node) {
    const { shape } = this.map;
    const row = shape.isLeaf(node) ? this.byKey.get(shape.record.tensors.keys[shape.leaf(node)]) : null;
    const share = this.known[node] ? this.changed[node] / this.known[node] : NaN;
    return nodeTip(shape, node, [row ? ["what", row.what] : null, [MEASURES[this.measure], percent(share)]]);
  },

  showSummary() {
    const counts = new Map();
    for (const { what } of this.rows) counts.set(what, (counts.get(what) ?? 0) + 1);
    const count = (what) => counts.get(what) ?? 0;
    const size = this.rows.filter((row) => row.what === "changed").reduce((all, row) => all + row.bytes, 0);
    const change = this.measure === "blocks" ? this.change() : null;
    const isLooked = this.measure !== "shape";
    byId("changes-summary").replaceChildren(
      facts([
        isLooked ? ["Changed", `${plural(count("changed"), "tensor")}, ${bytes(size)}`] : null,
        change ? ["In changed blocks", bytes(change.changed_bytes)] : null,
        ["Same", isLooked ? plural(count("same"), "tensor") : `${plural(count("in both"), "key")} in both`],
        count("not known") ? ["Not known", plural(count("not known"), "tensor")] : null,
        ["Added, removed", `${whole(count("added"))}, ${whole(count("removed"))}`],
        ["Other shape or dtype", whole(count("other shape") + count("other dtype"))],
        change ? ["Read to compare", bytes(change.bytes_read)] : null,
      ]),
    );
    byId("changes-count").textContent = plural(this.rows.length, "tensor");
    this.showNote();
  },

  showNote() {
    const { data } = view;
    const [a, b] = [data.steps[this.from], data.steps[this.to]];
    const why = [];
    if (!a || !b || !data.shape(this.from) || !data.shape(this.to))
      why.push("The tensors of one of these steps are not in the page.");
    else if (this.from === this.to) why.push("Pick two different steps.");
    else if (!this.change()) {
      const pair = `--compare ${shown(a.step ?? a.name)}:${shown(b.step ?? b.name)}`;
      why.push(`The blocks of these two steps were not compared when the page was made. `);
      why.push("To compare them: ", element("code", {}, `milepost view ${pair}`));
    }
    byId("changes-note").replaceChildren(...why);
    byId("changes-note").hidden = !why.length;
  },

  /** Values that differ, in the order of the state: [key, before, after]. */
  differing() {
    const { data } = view;
    const read = (step) => {
      const shape = data.shape(step);
      const values = shape && data.values(step);
      return values ? new Map(shape.record.value_keys.map((key, i) => [key, values[i]])) : null;
    };
    const [one, other] = [read(this.from), read(this.to)];
    const keys = one && other ? new Set([...one.keys(), ...other.keys()]) : new Set();
    const pairs = [...keys].map((key) => [key, one.get(key), other.get(key)]);
    return pairs.filter(([, before, after]) => before !== after);
  },

  showValues() {
    const differing = this.differing();
    byId("changes-values-card").hidden = !differing.length;
    const text = (value) => (value === undefined ? "–" : shortened(value, 300));
    const cells = differing.slice(0, MOST_VALUES).map(([key, a, b]) => [keyCell(key), text(a), text(b)]);
    byId("changes-values").replaceChildren(
      scrollTable("Values before and after", ["value", "before", "after"], cells, ["mono", "mono", "mono"]),
    );
    const more = differing.length > MOST_VALUES ? `, the first ${MOST_VALUES} shown` : "";
    byId("changes-values-count").textContent = `${plural(differing.length, "value")}${more}`;
  },

  scale() {
    if (this.measure === "blocks") return 1;
    return this.rows.reduce((most, row) => (row.share > most ? row.share : most), 1e-12);
  },

  showLegend() {
    const parts = [];
    if (this.measure !== "shape" && this.rows.length) {
      const ramp = element("i", { class: "ramp", "aria-hidden": "true" });
      parts.push(legendEntry("0 %", ramp, percent(this.most)));
    }
    const isUnknown = (row) => row.what === "not known" || row.what === "in both";
    if (this.rows.some(isUnknown)) parts.push(legendEntry(swatch(colour("unknown")), "not known"));
    if (this.rows.some((row) => row.what === "added")) parts.push(legendEntry(swatch(colour("c1")), "added or other"));
    byId("changes-legend").replaceChildren(...parts);
  },
};
panels.changes = changes;

function rankOf(row) {
  if (row.what === "other dtype" || row.what === "other shape") return 3;
  if (row.what === "added" || row.what === "removed") return 2;
  return Number.isNaN(row.share) ? -1 : row.share;
}

function changeBar(share) {
  const made = element("span", { class: "bar-cell", "aria-hidden": "true" });
  made.style.width = share > 0 ? `${Math.max(1, Math.round(100 * Math.min(1, share)))}%` : "0";
  made.hidden = !(share > 0);
  return made;
}
