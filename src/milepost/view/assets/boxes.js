// Boxes, layouts and plans: the arithmetic of core/box, core/spans, core/layout and core/division, again. Pure.
// A box is {offset, shape}; a layout is as the manifest spells it; a tensor has {key, shape, parts, turn, stored}.

const product = (sizes) => sizes.reduce((all, n) => all * n, 1);
const ceilDiv = (a, b) => Math.ceil(a / b);

const wholeBox = (shape) => ({ offset: shape.map(() => 0), shape: [...shape] });
const elementsOf = (box) => product(box.shape);

function intersect(one, other) {
  const offset = one.offset.map((start, d) => Math.max(start, other.offset[d]));
  const shape = offset.map(
    (start, d) => Math.min(one.offset[d] + one.shape[d], other.offset[d] + other.shape[d]) - start,
  );
  return shape.every((n) => n > 0) ? { offset, shape } : null;
}

/** How many boxes a box is split into. */
function partCount(box, parts) {
  return elementsOf(box) ? Math.min(Math.max(parts, 1), Math.max(1, ...box.shape)) : 0;
}

/** Box `j` of those that a box is split into. */
function partOf(box, j, parts) {
  const count = partCount(box, parts);
  if (count === 1) return box;
  let dim = box.shape.findIndex((n) => n >= parts);
  if (dim < 0) dim = box.shape.indexOf(Math.max(...box.shape));
  const length = box.shape[dim];
  const start = Math.floor((length * j) / count);
  const stop = Math.floor((length * (j + 1)) / count);
  const offset = [...box.offset];
  const shape = [...box.shape];
  offset[dim] += start;
  shape[dim] = stop - start;
  return { offset, shape };
}

const unpacked = new Map();

/** The ranks that text such as `0-3,8` stands for, in their order. */
function unpackRanks(text) {
  let ranks = unpacked.get(text);
  if (ranks) return ranks;
  ranks = [];
  for (const run of text ? text.split(",") : []) {
    const [first, last] = run.split("-").map(Number);
    for (let rank = first; rank <= (last === undefined ? first : last); rank += 1) ranks.push(rank);
  }
  if (unpacked.size > 4096) unpacked.clear();
  unpacked.set(text, ranks);
  return ranks;
}

/** The spans of one dimension that coordinate `index` of the cutting axes holds, in local order. */
function spansOf(length, steps, index) {
  let spans = length ? [[0, length]] : [];
  steps.forEach(([size, stride], axis) => {
    const total = spans.reduce((all, [a, b]) => all + b - a, 0);
    const chunk = ceilDiv(total, stride);
    const taken = [];
    for (let start = 0; start < total; start += Math.max(chunk, 1)) {
      const inner = Math.min(start + chunk, total) - start;
      const each = ceilDiv(inner, size);
      const low = start + Math.min(index[axis] * each, inner);
      const high = start + Math.min((index[axis] + 1) * each, inner);
      takeSpans(spans, low, high, taken);
    }
    spans = joinSpans(taken);
  });
  return spans;
}

function takeSpans(spans, start, stop, taken) {
  let position = 0;
  for (const [a, b] of spans) {
    const low = Math.max(start - position, 0);
    const high = Math.min(stop - position, b - a);
    if (low < high) taken.push([a + low, a + high]);
    position += b - a;
  }
}

function joinSpans(spans) {
  const joined = [];
  for (const [a, b] of spans) {
    const last = joined[joined.length - 1];
    if (last && last[1] === a) last[1] = b;
    else joined.push([a, b]);
  }
  return joined;
}

/** The ways to take one of each list, the last list the fastest; at most so many. */
function choices(lists, most = Infinity) {
  const total = Math.min(product(lists.map((list) => list.length)), most);
  return Array.from({ length: total }, (_, n) => {
    const made = new Array(lists.length);
    let left = n;
    for (let d = lists.length - 1; d >= 0; d -= 1) {
      made[d] = lists[d][left % lists[d].length];
      left = Math.floor(left / lists[d].length);
    }
    return made;
  });
}

const partitions = new Map();

/** The spans of one dimension in order, each with the coordinates of the cutting axes that hold it. */
function partition(length, steps) {
  const name = `${length}:${steps.join(";")}`;
  let found = partitions.get(name);
  if (!found) {
    const all = choices(steps.map(([size]) => Array.from({ length: size }, (_, i) => i)));
    found = all.flatMap((index) => spansOf(length, steps, index).map((span) => ({ span, index })));
    found.sort((one, other) => one.span[0] - other.span[0] || one.span[1] - other.span[1]);
    if (partitions.size > 1024) partitions.clear();
    partitions.set(name, found);
  }
  return found;
}

function meeting(length, steps, start, stop) {
  if (!steps.length) return [{ span: [0, length], index: [] }];
  if (steps.length > 1 || steps[0][1] > 1) {
    return partition(length, steps).filter(({ span }) => span[0] < stop && span[1] > start);
  }
  const size = ceilDiv(length, steps[0][0]);
  const found = [];
  for (let i = Math.floor(start / size); i <= Math.floor((stop - 1) / size); i += 1) {
    found.push({ span: [i * size, Math.min((i + 1) * size, length)], index: [i] });
  }
  return found;
}

/** What each axis of a grid does: its number and stride, by dimension. */
function cutsOf(grid, dims) {
  const axes = Array.from({ length: dims }, () => []);
  grid.cuts.forEach((cut, axis) => {
    if (cut) axes[cut[0]].push(axis);
  });
  const steps = axes.map((list) => list.map((axis) => [grid.mesh.shape[axis], grid.cuts[axis][1] ?? 1]));
  return { axes, steps };
}

const strides = (shape) => shape.map((_, d) => product(shape.slice(d + 1)));

/** The ranks that hold the same as the one at `where`: all along the axes that copy. */
function copiesAt(grid, where) {
  const ranks = unpackRanks(grid.mesh.ranks);
  const step = strides(grid.mesh.shape);
  let places = [0];
  grid.cuts.forEach((cut, axis) => {
    const along = cut ? [where[axis]] : Array.from({ length: grid.mesh.shape[axis] }, (_, i) => i);
    places = places.flatMap((place) => along.map((i) => place + i * step[axis]));
  });
  return places.map((place) => ranks[place]);
}

/** The boxes of a layout that meet a region, each with the ranks that hold it; at most so many. */
function overlapping(layout, shape, region, most = Infinity) {
  if (layout.kind === "whole") {
    return intersect(wholeBox(shape), region) ? [{ box: wholeBox(shape), ranks: unpackRanks(layout.ranks) }] : [];
  }
  if (layout.kind === "boxes") {
    return layout.held
      .map((held) => ({ box: { offset: held.box[0], shape: held.box[1] }, ranks: unpackRanks(held.ranks) }))
      .filter(({ box }) => intersect(box, region))
      .slice(0, most);
  }
  if (!elementsOf(region)) return [];
  const { axes, steps } = cutsOf(layout, shape.length);
  const found = shape.map((n, d) => meeting(n, steps[d], region.offset[d], region.offset[d] + region.shape[d]));
  return choices(found, most).map((choice) => {
    const where = layout.cuts.map(() => 0);
    choice.forEach(({ index }, dim) => axes[dim].forEach((axis, i) => (where[axis] = index[i])));
    const box = { offset: choice.map(({ span }) => span[0]), shape: choice.map(({ span }) => span[1] - span[0]) };
    return { box, ranks: copiesAt(layout, where) };
  });
}

/** What a rank holds of a tensor: boxes, and where each starts in the rank's local tensor. */
function piecesOf(layout, shape, rank) {
  const zero = shape.map(() => 0);
  if (layout.kind === "whole") {
    return unpackRanks(layout.ranks).includes(rank) ? [{ box: wholeBox(shape), at: zero }] : [];
  }
  if (layout.kind === "boxes") {
    return layout.held
      .filter((held) => unpackRanks(held.ranks).includes(rank))
      .map((held) => ({ box: { offset: held.box[0], shape: held.box[1] }, at: zero }));
  }
  const place = unpackRanks(layout.mesh.ranks).indexOf(rank);
  if (place < 0) return [];
  const where = strides(layout.mesh.shape).map((step, d) => Math.floor(place / step) % layout.mesh.shape[d]);
  const { axes, steps } = cutsOf(layout, shape.length);
  const spans = shape.map((n, d) => {
    let position = 0;
    const held = spansOf(
      n,
      steps[d],
      axes[d].map((axis) => where[axis]),
    );
    return held.map(([a, b]) => {
      const placed = { start: a, length: b - a, at: position };
      position += b - a;
      return placed;
    });
  });
  return choices(spans).map((choice) => ({
    box: { offset: choice.map((one) => one.start), shape: choice.map((one) => one.length) },
    at: choice.map((one) => one.at),
  }));
}

/** The parts of a box that ranks hold, each with the rank that wrote it. */
function partsOf(tensor, box, ranks) {
  const count = tensor.parts === 1 ? Number(elementsOf(box) > 0) : partCount(box, tensor.parts);
  return Array.from({ length: count }, (_, j) => ({
    box: tensor.parts === 1 ? box : partOf(box, j, tensor.parts),
    rank: ranks[(tensor.turn + j) % ranks.length],
  }));
}

/** The name of the entry that holds a box of a tensor. */
function entryName(key, box, shape) {
  const isWhole = box.shape.every((n, d) => n === shape[d]) && !key.endsWith("]");
  const name = isWhole ? key : `${key}[${box.offset.map((a, d) => `${a}:${a + box.shape[d]}`).join(",")}]`;
  return name.startsWith("@") || name.startsWith("__") ? `@@${name}` : name;
}

/** What to read for a region of a tensor: disjoint boxes, each from one entry of one rank's file. */
function readPlan(tensor, layout, region) {
  const plan = [];
  for (const held of overlapping(layout, tensor.shape, region)) {
    for (const part of partsOf(tensor, held.box, held.ranks)) {
      const box = intersect(part.box, region);
      if (box)
        plan.push({ rank: part.rank, name: entryName(tensor.stored, part.box, tensor.shape), source: part.box, box });
    }
  }
  return plan;
}

/** The parts of a tensor, at most so many: box, the rank that wrote it, and all ranks that held it. */
function savedParts(tensor, layout, most = Infinity) {
  const held = overlapping(layout, tensor.shape, wholeBox(tensor.shape), most);
  const parts = held.flatMap(({ box, ranks }) =>
    partsOf(tensor, box, ranks).map((part) => ({ ...part, holders: ranks })),
  );
  return parts.length > most ? parts.slice(0, most) : parts;
}

/** How many boxes a layout cuts a tensor into, before copies share the writing. */
function boxCount(layout, shape) {
  if (layout.kind !== "grid") return layout.kind === "whole" ? 1 : layout.held.length;
  if (!product(shape)) return 0;
  const { steps } = cutsOf(layout, shape.length);
  return product(shape.map((n, d) => meeting(n, steps[d], 0, n).length));
}
