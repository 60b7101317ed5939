// The tree of a step, its search, the treemap, and what is known of the picked leaf.

const tensors = {
  list: null,
  map: null,
  open: new Set(),
  byNode: new Map(),
  query: "",
  drawn: null,
  step: -1,
  leaves: [],
  statistics: null,
  found: [],

  start() {
    this.list = new VirtualList(byId("tree"), {
      columns: [
        {
          name: "name",
          class: "key",
          width: "minmax(112px, 3fr)",
          cell: (row) => this.nameCell(row),
          title: (row) => this.shape.pathOf(row.node),
        },
        { name: "dtype", class: "soft", width: "minmax(44px, 0.6fr)", cell: (row) => this.cellText(row, "dtype") },
        { name: "shape", class: "num soft", width: "minmax(58px, 1.1fr)", cell: (row) => this.cellText(row, "shape") },
        { name: "size", class: "num", width: "minmax(58px, 0.7fr)", cell: (row) => this.cellText(row, "size") },
      ],
      label: "Tree of the state",
      same: (one, other) => one.node === other.node,
      tree: (row) => ({ level: row.level, expanded: row.isLeaf ? undefined : row.isOpen }),
      onPick: (row) => (row.isLeaf ? this.pickLeaf(row.node) : this.toggle(row.node)),
      onKey: (event, row) => this.onKey(event, row),
    });
    byId("search").addEventListener("input", (event) => whileBusy(() => this.typed(event.target.value)));
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") {
        event.preventDefault();
        this.search(event.target.value);
        byId("tree").focus();
      }
    });
    byId("treemap-colour").addEventListener("change", () => this.drawMap());
    this.map = new TreeMap(byId("treemap"), byId("treemap-path"), {
      fill: (node) => this.colours.of(node),
      tip: (node) => nodeTip(this.shape, node),
      pick: (node) => this.pickLeaf(node),
    });
  },

  /** Search when nothing more was typed for a moment. */
  async typed(text) {
    this.newest = text;
    await new Promise((go) => setTimeout(go, 60));
    if (this.newest === text) this.search(text);
  },

  get shape() {
    return view.data.shape(view.step);
  },

  async update({ scroll }) {
    const { data, step } = view;
    const name = `${data.number}:${step}`;
    if (this.step !== name) {
      const found = await data.statistics(step);
      if (data !== view.data || step !== view.step) return; // something else was picked meanwhile
      this.step = name;
      this.statistics = found;
      const isKnown = this.shape === this.drawn && this.shape !== null;
      if (!isKnown) this.takeShape();
      this.search(this.query, { keep: isKnown });
      if (!isKnown) this.drawMap();
    }
    this.showPicked(null, { scroll });
  },

  takeShape() {
    const { shape } = this;
    this.drawn = shape;
    this.open = new Set();
    this.leaves = shape ? leavesOf(shape) : [];
    this.byNode = new Map(this.leaves.map((leaf) => [leaf.node, leaf]));
    if (shape) this.openFirst();
  },

  recolour() {
    this.drawMap();
  },

  /** Open the top until a few dozen rows are in sight. */
  openFirst() {
    const { shape } = this;
    let level = [0];
    let rows = 1;
    while (level.length) {
      const below = level.flatMap((node) => (shape.isLeaf(node) ? [] : shape.children(node)));
      if (rows > 1 && rows + below.length > 40) break;
      level.forEach((node) => this.open.add(node));
      rows += below.length;
      level = below;
    }
  },

  search(text, { keep = false } = {}) {
    this.query = text;
    const { shape } = this;
    if (shape && shape !== this.drawn) return; // it is being taken in, and will be searched then
    if (!shape) {
      this.list.show([]);
      byId("tree-count").textContent = "the tensors of this step are not in the page";
      return;
    }
    const query = parseQuery(text);
    let wanted = null;
    if (query.tests.length) {
      wanted = new Map();
      for (const leaf of this.leaves) {
        if (!query.matches(leaf)) continue;
        for (let node = leaf.node; node >= 0 && !wanted.get(node); node = shape.parent[node]) wanted.set(node, true);
      }
    }
    const rows = this.rows(wanted);
    const found = wanted ? this.leaves.filter((leaf) => wanted.has(leaf.node)) : this.leaves;
    this.found = found;
    this.list.show(rows, { keep });
    if (wanted && found.length) this.list.active = rows.findIndex((row) => row.isLeaf);
    this.list.mark();
    const size = found.reduce((all, leaf) => all + shape.bytes[leaf.node], 0);
    const count = wanted
      ? `${whole(found.length)} of ${plural(this.leaves.length, "key")}`
      : plural(this.leaves.length, "key");
    byId("tree-count").textContent = query.problem || `${count}, ${bytes(size)}`;
  },

  rows(wanted) {
    const { shape } = this;
    const rows = [];
    const walk = (node, level) => {
      const isLeaf = shape.isLeaf(node);
      const isOpen = !isLeaf && (wanted ? !this.open.has(-node - 1) : this.open.has(node));
      if (node > 0 || isLeaf) rows.push({ node, level, isLeaf, isOpen });
      if (isLeaf || (node > 0 && !isOpen)) return;
      for (const child of shape.children(node))
        if (!wanted || wanted.has(child)) walk(child, node > 0 ? level + 1 : level);
    };
    walk(0, 0);
    return rows;
  },

  toggle(node, open) {
    const mark = parseQuery(this.query).tests.length ? -node - 1 : node;
    const has = this.open.has(mark);
    const wants = open === undefined ? !has : mark < 0 ? !open : open;
    if (wants) this.open.add(mark);
    else this.open.delete(mark);
    const active = this.list.rows[this.list.active]?.node ?? node;
    this.search(this.query, { keep: true });
    const at = this.list.rows.findIndex((row) => row.node === active);
    this.list.activate(Math.max(0, at), false);
  },

  onKey(event, row) {
    if (event.key === "ArrowRight" && !row.isLeaf) {
      if (!row.isOpen) this.toggle(row.node, true);
      else this.list.activate(Math.min(this.list.active + 1, this.list.rows.length - 1));
      return true;
    }
    if (event.key === "ArrowLeft") {
      if (!row.isLeaf && row.isOpen) this.toggle(row.node, false);
      else {
        const at = this.list.rows.findIndex((one) => one.node === this.shape.parent[row.node]);
        if (at >= 0) this.list.activate(at);
      }
      return true;
    }
    return false;
  },

  nameCell(row) {
    const { shape } = this;
    const indent = element("span", { class: "indent", "aria-hidden": "true" });
    indent.style.width = `${row.level * 16}px`;
    const twist = element(
      "span",
      { class: row.isOpen ? "twist open" : "twist", "aria-hidden": "true" },
      row.isLeaf ? "" : "›",
    );
    return [indent, twist, shown(shape.name(row.node)) || "(empty name)"];
  },

  cellText(row, column) {
    const { shape } = this;
    if (!row.isLeaf)
      return column === "size"
        ? bytes(shape.bytes[row.node])
        : column === "shape"
          ? plural(shape.leaves[row.node], "key")
          : "";
    const kind = shape.kindOf(row.node);
    if (kind === "value")
      return column === "shape"
        ? shortened(view.data.values(view.step)?.[shape.leaf(row.node)] ?? "–", 40)
        : column === "dtype"
          ? "value"
          : "";
    if (kind === "per_rank") return column === "shape" ? "one a rank" : column === "dtype" ? "private" : "";
    const tensor = shape.tensor(shape.leaf(row.node));
    return {
      dtype: SHORT_DTYPES[tensor.dtype] ?? tensor.dtype,
      shape: shapeText(tensor.shape),
      size: bytes(tensor.bytes),
    }[column];
  },

  pickLeaf(node) {
    const leaf = this.byNode.get(node);
    this.pickedNode = node;
    if (leaf.kind === "tensor") pickTensor(leaf.key);
    else {
      view.key = null;
      this.showPicked(leaf);
      announce(`${shown(leaf.key)} selected`);
    }
  },

  showPicked(leaf = null, { scroll = false } = {}) {
    const { shape } = this;
    const host = byId("tensor-details");
    const index = view.key === null || !shape ? undefined : shape.index.get(view.key);
    const picked = leaf ?? (index === undefined ? null : (this.byNode.get(shape.nodeOf[index]) ?? null));
    if (!picked) {
      byId("tensor-heading").textContent = "Selected";
      host.replaceChildren(
        element(
          "p",
          { class: "muted" },
          view.key === null ? "Pick a tensor or a value in the tree." : `${shown(view.key)} is not in this step.`,
        ),
      );
      this.list.picked = null;
      this.list.mark();
      return;
    }
    this.list.pick({ node: picked.node }, { scroll });
    byId("tensor-heading").textContent = { tensor: "Tensor", value: "Value", per_rank: "Private values" }[picked.kind];
    host.replaceChildren(
      element("p", { class: "key-line" }, shown(picked.key)),
      ...leafDetails(picked, this.statistics),
    );
  },

  drawMap() {
    byId("treemap-card").hidden = !this.shape;
    if (!this.shape) return;
    this.colours = this.mapColours();
    this.map.show(this.shape);
    const { names } = this.colours;
    byId("treemap-legend").replaceChildren(...names.map(([name, tone]) => legendEntry(swatch(tone), name)));
  },

  /** The largest parts of the state, level by level, up to as many as there are colours. */
  groups() {
    const { shape } = this;
    const below = (node) => shape.children(node).filter((child) => shape.bytes[child] > 0);
    let groups = [0];
    for (;;) {
      const next = groups.flatMap((node) => (shape.isLeaf(node) ? [node] : below(node)));
      const isFirst = groups.length === 1 && groups[0] === 0;
      if ((!isFirst && next.length > palette().length) || next.every((node, i) => node === groups[i])) break;
      groups = next;
    }
    return groups.sort((a, b) => shape.bytes[b] - shape.bytes[a] || a - b);
  },

  mapColours() {
    const { shape } = this;
    const tones = palette();
    if (byId("treemap-colour").value === "dtype") {
      const { dtype } = shape.record.tensors;
      const used = [...new Set(dtype)];
      const tone = new Map(used.map((i, n) => [i, tones[n % tones.length]]));
      const of = (node) => tone.get(dtype[this.heaviest(node)]);
      return { of, names: used.slice(0, 12).map((i) => [shown(shape.record.dtypes[i]), tone.get(i)]) };
    }
    const owner = new Map();
    const groups = this.groups();
    groups.forEach((group, n) => {
      for (let node = group; node < shape.end[group] && n < tones.length; node += 1) owner.set(node, tones[n]);
    });
    const names = groups
      .slice(0, tones.length)
      .map((node, n) => [shortened(shape.pathOf(node) || "all", 40), tones[n]]);
    if (groups.length > tones.length) names.push(["others", colour("unknown")]);
    return { of: (node) => owner.get(node) ?? colour("unknown"), names };
  },

  /** The number of the largest tensor in a part of the tree. */
  heaviest(node) {
    const { shape } = this;
    let at = node;
    while (!shape.isLeaf(at)) at = shape.children(at).reduce((a, b) => (shape.bytes[b] > shape.bytes[a] ? b : a));
    return shape.leaf(at);
  },
};
panels.tensors = tensors;
