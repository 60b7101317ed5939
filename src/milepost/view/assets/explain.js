// What the ranks of another mesh would read: the same as `milepost explain`, worked out in the page. Pure.

const MOST_RANKS = 16384;
const MOST_READS = 200_000;
/** More boxes than that are not worked out for one tensor: the page would stand still. */
const MOST_READS_IN_ALL = 5_000_000;

/** The grid that a mesh and cuts stand for. Throws with what is wrong. */
function gridOf(mesh, cuts, dims, ranks = null) {
  if (!mesh.length || mesh.some((n) => !Number.isInteger(n) || n < 1))
    throw new Error("A mesh is sizes with × between them, such as 2×4.");
  if (product(mesh) > MOST_RANKS) throw new Error(`The page works out at most ${whole(MOST_RANKS)} ranks.`);
  const made = mesh.map((_, axis_) => {
    const cut = cuts[axis_] ?? null;
    if (cut === null) return null;
    const [dim, stride] = Array.isArray(cut) ? cut : [cut.dim, cut.stride ?? 1];
    if (dim >= dims) throw new Error(`The tensor has no dimension ${dim}.`);
    return [dim, stride ?? 1];
  });
  return { kind: "grid", mesh: { shape: mesh, ranks: ranks ?? `0-${product(mesh) - 1}` }, cuts: made };
}

/** What each rank of a grid reads of a tensor: [{rank, pieces, reads, bytes}]. */
function explainTensor(tensor, saved, grid, most = MOST_READS) {
  const plans = new Map();
  let count = 0;
  return unpackRanks(grid.mesh.ranks).map((rank) => {
    const pieces = piecesOf(grid, tensor.shape, rank);
    const name = JSON.stringify(pieces.map(({ box }) => [box.offset, box.shape]));
    if (!plans.has(name)) {
      const plan = pieces.flatMap(({ box }) => readPlan(tensor, saved, box));
      count += plan.length;
      if (count > most)
        throw new Error(`These ranks would read more than ${whole(most)} boxes: too many for the page.`);
      plans.set(
        name,
        plan.map((read) => ({ ...read, bytes: elementsOf(read.box) * tensor.itemBytes })),
      );
    }
    const found = plans.get(name);
    return { rank, pieces, reads: found, bytes: found.reduce((all, read) => all + read.bytes, 0) };
  });
}

/**
 * The same for all tensors of a structure, in turns: yields how many are done. A tensor that lacks a dimension which an
 * axis cuts is copied by that axis. Gives [{rank, bytes, count, sources}], where `sources` maps a rank that saved to
 * the bytes from its file.
 */
function* explainAll(shape, mesh, cuts) {
  const rows = Array.from({ length: product(mesh) }, (_, rank) => ({ rank, bytes: 0, count: 0, sources: new Map() }));
  const alike = new Map();
  const { tensors, shapes } = shape.record;
  for (let i = 0; i < shape.count; i += 1) {
    const { parts, turn, layout } = tensors;
    const looks = [tensors.dtype[i], tensors.shape[i], layout[i], parts[i], turn[i]].join();
    const known = alike.get(looks);
    if (known) known.times += 1;
    else alike.set(looks, { i, times: 1 });
  }
  let [done, left] = [0, MOST_READS_IN_ALL];
  for (const { i, times } of alike.values()) {
    const tensor = shape.tensor(i);
    const saved = shape.layouts[tensor.layout];
    if (!saved) throw new Error("The layout of a tensor is not in the page.");
    const dims = shapes[tensors.shape[i]].length;
    const fitting = cuts.map((cut) => (cut && cut.dim < dims ? cut : null));
    for (const plan of explainTensor(tensor, saved, gridOf(mesh, fitting, dims), Math.min(left, MOST_READS))) {
      const row = rows[plan.rank];
      left -= plan.reads.length;
      row.count += times * plan.reads.length;
      for (const read of plan.reads) {
        row.bytes += times * read.bytes;
        row.sources.set(read.rank, (row.sources.get(read.rank) ?? 0) + times * read.bytes);
      }
    }
    if (left < 0) throw new Error("These ranks would read more boxes than the page can work out.");
    done += times;
    yield done;
  }
  return rows;
}
