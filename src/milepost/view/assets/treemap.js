// A treemap of a step's tree: as deep as its place lets one read, with a path above it that leads back up.

const LEAST_AREA = 420;
/** The area that a box of the map gets at least, in pixels. Containers whose children would get less are one box. */
const HEAD_AREA = 7000;
const MOST_HEADS = 3;

class TreeMap {
  /** `look`: {fill(node) -> colour, tip(node) -> element, pick(leaf)}; `path`: the place of the buttons that lead up. */
  constructor(host, path, look) {
    this.path = path;
    this.look = look;
    this.shape = null;
    this.root = 0;
    this.chart = new Chart(host, () => this.build());
    this.chart.made = (drawing) => drawing.on("click", (event) => this.onClick(event));
  }

  show(shape) {
    if (shape !== this.shape) this.root = 0;
    this.shape = shape;
    this.draw();
  }

  draw() {
    this.chart.draw();
    this.showPath();
  }

  goTo(node) {
    this.root = node;
    this.draw();
    announce(`The map shows ${this.shape.pathOf(node) || "all tensors"}, ${bytes(this.shape.bytes[node])}`);
  }

  showPath() {
    const nodes = [];
    for (let at = this.shape ? this.root : -1; at >= 0; at = this.shape.parent[at]) nodes.unshift(at);
    const names = nodes.map((node) => (node ? shortened(this.shape.name(node), 30) || "(empty name)" : "all"));
    const buttons = nodes.map((node, i) =>
      i === nodes.length - 1
        ? element("span", { "aria-current": "true" }, names[i])
        : element("button", { type: "button", class: "crumb", onclick: () => this.goTo(node) }, names[i]),
    );
    const hint = element("span", { class: "crumb-hint" }, "Click a part to look closer.");
    this.path.replaceChildren(...(buttons.length > 1 ? buttons : [hint]));
  }

  onClick(event) {
    const node = Number(event.data?.id || NaN); // the box of the rest has none
    if (!Number.isInteger(node)) return;
    if (this.shape.isLeaf(node)) this.look.pick(node);
    else this.goTo(node);
  }

  /** The node that stands for a chain of containers with one child each, and the names on the way. */
  chain(node) {
    const names = [this.shape.name(node)];
    let at = node;
    while (!this.shape.isLeaf(at)) {
      const below = this.shape.children(at).filter((child) => this.shape.bytes[child] > 0);
      if (below.length !== 1) break;
      [at] = below;
      names.push(this.shape.name(at));
    }
    return { at, name: shortened(names.join("."), 60) };
  }

  grow(node, area, depth) {
    const { shape } = this;
    const below = shape.children(node).filter((child) => shape.bytes[child] > 0);
    below.sort((a, b) => shape.bytes[b] - shape.bytes[a] || a - b);
    const room = Math.max(1, Math.floor(area / LEAST_AREA));
    const drawn = below.slice(0, below.length > room ? room - 1 : room);
    const items = drawn.map((child) => this.item(child, (area * shape.bytes[child]) / shape.bytes[node], depth));
    const rest = below.slice(drawn.length).reduce((all, child) => all + shape.bytes[child], 0);
    if (rest > 0) items.push(this.box("", `${whole(below.length - drawn.length)} more`, rest, colour("unknown"), area));
    return items;
  }

  item(child, area, depth) {
    const { shape } = this;
    const { at, name } = this.chain(child);
    const parts = shape.isLeaf(at) ? 0 : shape.children(at).length;
    if (!parts || area / parts < LEAST_AREA) {
      return this.box(at, name || "(empty name)", shape.bytes[at], this.look.fill(at), area);
    }
    const hasHead = depth < MOST_HEADS && area > HEAD_AREA;
    const head = { show: hasHead, height: 17, color: colour("text"), fontSize: 11, overflow: "truncate" };
    return {
      id: String(at),
      name,
      value: shape.bytes[at],
      upperLabel: { ...head, backgroundColor: "transparent", padding: [0, 4] },
      itemStyle: { color: colour("raised"), borderColor: colour("raised"), borderWidth: 2, gapWidth: depth ? 1 : 2 },
      children: this.grow(at, area, depth + 1),
    };
  }

  box(node, name, value, fill, area) {
    return {
      id: String(node),
      name,
      value,
      itemStyle: { color: fill, borderColor: fill, borderWidth: 0 },
      label: { show: fits(name, area), color: inkOn(fill) },
    };
  }

  build() {
    const { shape, root } = this;
    if (!shape || !(shape.bytes[root] > 0)) return { series: [] };
    const { clientWidth, clientHeight } = this.chart.host;
    const card = colour("card");
    return {
      tooltip: tooltip((found) => {
        const node = Number(found.data?.id || NaN);
        return Number.isInteger(node) ? this.look.tip(node) : "";
      }),
      series: [
        {
          type: "treemap",
          animation: false, // said here: the map heeds no other; a click on boxes that move would hit another one
          data: this.grow(root, clientWidth * clientHeight, 0),
          left: 0,
          right: 0,
          top: 0,
          bottom: 0,
          sort: false,
          roam: false,
          nodeClick: false,
          visibleMin: 0,
          breadcrumb: { show: false },
          label: { fontSize: 11, overflow: "truncate", ellipsis: "…", padding: [3, 4] },
          emphasis: { itemStyle: { borderColor: colour("text"), borderWidth: 2 } },
          levels: [{ itemStyle: { borderColor: card, borderWidth: 0, gapWidth: 4 }, upperLabel: { show: false } }],
        },
      ],
    };
  }
}

/** Whether a name can be read in a box of this area, whatever its sides are like. */
function fits(name, area) {
  const side = Math.sqrt(area);
  return side > 16 && Math.min(name.length, 9) * 6.2 + 8 < 1.35 * side;
}

/** The tooltip of a node: its path, its size, and more rows. */
function nodeTip(shape, node, rows = []) {
  return tip(
    shape.pathOf(node) || "all",
    [
      ["size", bytes(shape.bytes[node])],
      ["share", percent(shape.bytes[node] / shape.bytes[0])],
      shape.isLeaf(node) ? null : ["keys", whole(shape.leaves[node])],
      ...rows,
    ].filter(Boolean),
  );
}
