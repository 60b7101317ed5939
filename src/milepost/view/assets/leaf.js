// One leaf of a state: what the search asks about it, and what is told of it when it is picked.

class Leaf {
  constructor(shape, node, kind, number_, key) {
    Object.assign(this, { shape, node, kind, number: number_, key, lower: key.toLowerCase() });
  }

  tensor() {
    return this.shape.tensor(this.number);
  }

  layoutKind() {
    return this.kind === "tensor" ? (this.shape.layouts[this.tensor().layout]?.kind ?? "") : "";
  }

  isHeldBy(rank) {
    if (this.kind === "per_rank") return unpackRanks(this.shape.record.private[this.number][1]).includes(rank);
    if (this.kind !== "tensor") return false;
    const tensor = this.tensor();
    const layout = this.shape.layouts[tensor.layout];
    return layout ? piecesOf(layout, tensor.shape, rank).some(({ box }) => elementsOf(box) > 0) : false;
  }

  isOdd(what) {
    const odd = this.kind === "tensor" ? tensors.statistics?.odd.get(this.number) : undefined;
    return odd !== undefined && (what === "unhealthy" || odd[what] > 0);
  }
}

/** All leaves of a structure, in the order of the tree. */
function leavesOf(shape) {
  const { keys } = shape.record.tensors;
  const keyOf = {
    tensor: (i) => keys[i],
    value: (i) => shape.record.value_keys[i],
    per_rank: (i) => shape.record.private[i][0],
  };
  const found = [];
  for (let node = 0; node < shape.record.tree.depth.length; node += 1) {
    if (!shape.isLeaf(node)) continue;
    const kind = shape.kindOf(node);
    const i = shape.leaf(node);
    found.push(new Leaf(shape, node, kind, i, keyOf[kind](i)));
  }
  return found;
}

function leafDetails(leaf, statistics) {
  if (leaf.kind === "value") {
    const value = view.data.values(view.step)?.[leaf.number];
    const text = value === undefined ? "not in the page" : shown(value).replaceAll("\\u{a}", "\n");
    return [element("pre", { class: "value", tabindex: 0 }, text)];
  }
  if (leaf.kind === "per_rank") {
    const ranks = unpackRanks(leaf.shape.record.private[leaf.number][1]);
    return [
      facts([
        ["Ranks", rankText(ranks)],
        ["Where", "in the file of each rank; the page does not hold them"],
      ]),
    ];
  }
  return tensorDetails(leaf.tensor(), leaf.shape, statistics);
}

function tensorDetails(tensor, shape, statistics) {
  const row = statistics?.row(tensor.index);
  const rows = [
    ["Shape", shapeText(tensor.shape)],
    ["Elements", whole(product(tensor.shape))],
    ["Dtype", shown(tensor.dtype)],
    ["Size", bytes(tensor.bytes)],
    ["Kind", tensor.kind === "tensor" ? "" : shown(tensor.kind)],
    ["Tied to", shown(tensor.sameAs)],
    ["Layout", layoutText(shape.layouts[tensor.layout], tensor)],
  ];
  if (row) {
    const numbers = COLUMNS.map((name) => [name, number(row[name])]);
    rows.push(...numbers, ["NaN", oddText(row.nan)], ["Inf", oddText(row.inf)]);
  }
  const action = (text, tab) =>
    element("button", { type: "button", class: "action", onclick: () => showTab(tab, true) }, text);
  const history = view.data.record.statistics.length ? action("Show its statistics", "statistics") : null;
  const actions = element("div", { class: "actions" }, action("Show its layout", "layout"), history);
  return [facts(rows), actions];
}

function oddText(count) {
  return count ? element("span", { class: "odd" }, whole(count)) : "0";
}

/** How a tensor is cut, in words. */
function layoutText(layout, tensor) {
  if (!layout) return "left out: too many boxes";
  if (layout.kind === "whole") return `whole on ${plural(unpackRanks(layout.ranks).length, "rank")}`;
  if (layout.kind === "boxes") return `${plural(layout.held.length, "box", "boxes")}, listed one by one`;
  const axes = layout.cuts.map((cut, i) => {
    const size = layout.mesh.shape[i];
    if (!cut) return `${size} copies`;
    return `${size}-way over dim ${cut[0]}${(cut[1] ?? 1) > 1 ? ` (stride ${cut[1]})` : ""}`;
  });
  const parts = tensor.parts > 1 ? `; copies share the writing, ${tensor.parts} parts` : "";
  return `mesh ${layout.mesh.shape.join(" × ")}: ${axes.join(", ")}${parts}`;
}
