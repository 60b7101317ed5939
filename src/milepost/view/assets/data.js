// The data of the page: decoded once, the columns of statistics and changes when they are first asked for.

async function inflated(id) {
  const text = byId(id).textContent.trim();
  return text ? inflate(text) : new Uint8Array();
}

async function inflate(text) {
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const made = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) made[i] = binary.charCodeAt(i);
  return made;
}

const COLUMNS = ["min", "max", "mean", "rms"];
const SHORT_DTYPES = {
  bfloat16: "bf16",
  float16: "f16",
  float32: "f32",
  float64: "f64",
  int64: "i64",
  int32: "i32",
  int16: "i16",
  int8: "i8",
  uint8: "u8",
  uint16: "u16",
  uint32: "u32",
  uint64: "u64",
  complex64: "c64",
  complex128: "c128",
  float8_e4m3fn: "f8e4m3",
  float8_e5m2: "f8e5m2",
  float8_e8m0fnu: "f8e8m0",
};

/** A structure with what is asked of it again and again: tensors as objects, the tree with parents and sizes. */
class Shape {
  constructor(record) {
    this.record = record;
    this.layouts = record.layouts;
    this.count = record.tensors.keys.length;
    this.index = new Map(record.tensors.keys.map((key, i) => [key, i]));
    this.sizes = new Float64Array(this.count);
    const elements = record.shapes.map(product);
    for (let i = 0; i < this.count; i += 1) {
      this.sizes[i] = elements[record.tensors.shape[i]] * record.item_bytes[record.tensors.dtype[i]];
    }
    this.growTree();
  }

  tensor(i) {
    const { tensors, shapes, dtypes, item_bytes: itemBytes, kinds } = this.record;
    const same = tensors.same_as[i];
    return {
      index: i,
      key: tensors.keys[i],
      dtype: dtypes[tensors.dtype[i]],
      itemBytes: itemBytes[tensors.dtype[i]],
      shape: shapes[tensors.shape[i]],
      layout: tensors.layout[i],
      parts: tensors.parts[i],
      turn: tensors.turn[i],
      kind: kinds[tensors.kind[i]],
      sameAs: same < 0 ? "" : tensors.keys[same],
      stored: same < 0 ? tensors.keys[i] : tensors.keys[same],
      bytes: this.sizes[i],
    };
  }

  growTree() {
    const { depth, kind, leaf } = this.record.tree;
    const { kinds, tensors } = this.record;
    const count = depth.length;
    this.parent = new Int32Array(count).fill(-1);
    this.end = new Int32Array(count);
    this.bytes = new Float64Array(count);
    this.leaves = new Int32Array(count);
    this.nodeOf = new Int32Array(this.count).fill(-1);
    this.kindOf = (node) => kinds[kind[node]];
    const open = [];
    for (let node = 0; node < count; node += 1) {
      while (open.length > depth[node]) this.end[open.pop()] = node;
      if (open.length) this.parent[node] = open[open.length - 1];
      open.push(node);
      if (kinds[kind[node]] === "tensor") this.nodeOf[leaf[node]] = node;
    }
    while (open.length) this.end[open.pop()] = count;
    for (let node = count - 1; node >= 0; node -= 1) {
      const what = this.kindOf(node);
      // A tied tensor is stored once: under its other key.
      if (what === "tensor" && tensors.same_as[leaf[node]] < 0) this.bytes[node] = this.sizes[leaf[node]];
      if (this.isLeaf(node)) this.leaves[node] = 1;
      if (this.parent[node] >= 0) {
        this.bytes[this.parent[node]] += this.bytes[node];
        this.leaves[this.parent[node]] += this.leaves[node];
      }
    }
  }

  isLeaf(node) {
    return this.record.tree.leaf[node] >= 0;
  }

  name(node) {
    return this.record.tree.name[node];
  }

  leaf(node) {
    return this.record.tree.leaf[node];
  }

  children(node) {
    const found = [];
    for (let child = node + 1; child < this.end[node]; child = this.end[child]) found.push(child);
    return found;
  }

  /** The names on the way to a node. */
  pathOf(node) {
    const names = [];
    for (let at = node; at > 0; at = this.parent[at]) names.unshift(shown(this.name(at)) || "(empty name)");
    return names.join(" › ");
  }
}

const rankName = (rank) => String(rank).padStart(5, "0");
const shardName = (rank) => `${rankName(rank)}.safetensors`;

/** All data of the page, and questions about it. Steps are named by their place in the list. */
class PageData {
  static count = 0;

  constructor(record, sections) {
    if (record.version !== 1) throw new Error(`this page cannot show data of version ${record.version}`);
    this.record = record;
    this.steps = record.steps.map((step) => ({
      state: "whole",
      format: "milepost",
      reason: "",
      created: "",
      metadata: {},
      phases: [],
      kept: [],
      size_bytes: 0,
      new_bytes: null,
      reused: null,
      world: 0,
      structure: -1,
      files: -1,
      values: {},
      verified: "",
      step: null,
      generation: 0,
      ...step,
      metrics: new Map(Object.entries(step.metrics ?? {})),
    }));
    this.sections = sections;
    PageData.count += 1;
    this.number = PageData.count;
    this.shapes = new Map();
    this.blobs = new Map();
    this.rows = new Map(record.statistics.map((one) => [one.step, one]));
    this.pairs = new Map(record.changes.map((one) => [`${one.before}:${one.after}`, one]));
    this.usable = this.steps.map((_, i) => i).filter((i) => this.steps[i].structure >= 0);
    this.isIncremental = this.steps.some((step) => step.reused);
    this.kept = new Map();
  }

  static async fromPage() {
    const record = JSON.parse(new TextDecoder().decode(await inflated("milepost-page")));
    return new PageData(record, { statistics: "milepost-statistics", changes: "milepost-changes" });
  }

  /** The data of a page from its three parts, as base64 of deflated bytes. */
  static async fromTexts({ page, statistics: numbers, changes: column }) {
    const record = JSON.parse(new TextDecoder().decode(await inflate(page)));
    return new PageData(record, { statistics: await inflate(numbers), changes: await inflate(column) });
  }

  /** The time from which ages count: that of the page; of a live one, the present. */
  get now() {
    return live.at ? new Date().toISOString() : this.record.made;
  }

  /** Structures that are as they were stay the same objects, so that what is open in a tree stays open. */
  adopt(old) {
    const texts = new Map([...old.shapes].map(([i, shape]) => [JSON.stringify(old.record.structures[i]), shape]));
    this.record.structures.forEach((one, i) => {
      const known = texts.size ? texts.get(JSON.stringify(one)) : undefined;
      if (known) this.shapes.set(i, known);
    });
  }

  label(step) {
    const { step: number_, name } = this.steps[step];
    return number_ === null ? shown(name || "checkpoint") : whole(number_);
  }

  shape(step) {
    const number_ = this.steps[step].structure;
    if (number_ < 0) return null;
    if (!this.shapes.has(number_)) this.shapes.set(number_, new Shape(this.record.structures[number_]));
    return this.shapes.get(number_);
  }

  layout(step, tensor) {
    return this.shape(step).layouts[tensor.layout];
  }

  files(step) {
    const number_ = this.steps[step].files;
    return number_ < 0 ? null : this.record.files[number_];
  }

  /** The file that holds an entry of a rank: its own, or one of an earlier save. */
  fileName(step, rank, entry) {
    const names = this.files(step)?.names ?? [];
    if (names.length) return names[rank] ?? `file ${rank}`;
    const save = this.steps[step].save_id;
    const own = `data/${save}/${shardName(rank)}`;
    const older = this.olderFiles(step, rank);
    if (!older) return own;
    if (!older.isKnown) return `a file of rank ${rank}, of this save or an earlier one`;
    const file = older.entries.get(entry);
    if (!file) return own;
    const [, savedBy, writer, folder] = file;
    if (folder) return `../${folder}/data/${savedBy}/${shardName(writer)}`;
    return `data/${save}/${rankName(rank)}-${savedBy}-${shardName(writer)}`;
  }

  /** The entries that a rank has in files of earlier saves: {isKnown, entries: entry -> file}; null without any. */
  olderFiles(step, rank) {
    const number_ = this.steps[step].files;
    if (number_ < 0) return this.steps[step].reused ? { isKnown: false } : null;
    if (!this.kept.has(number_)) {
      const ranks = new Map();
      for (const file of this.record.files[number_].older ?? []) {
        const [of, , , , , , entries] = file;
        if (!ranks.has(of)) ranks.set(of, { isKnown: true, entries: new Map() });
        const found = ranks.get(of);
        found.isKnown = found.isKnown && entries !== null;
        for (const entry of entries ?? []) found.entries.set(entry, file);
      }
      this.kept.set(number_, ranks);
    }
    return this.kept.get(number_).get(rank) ?? null;
  }

  /**
   * The values of a step by number: the newest step has all, each older one what differs. Steps between them that could
   * not be read have none.
   */
  values(step) {
    const structure = this.steps[step].structure;
    const isLinked = (one) => one.structure < 0 || !one.values_anew;
    let from = step;
    while (from < this.steps.length && isLinked(this.steps[from])) from += 1;
    if (from >= this.steps.length || this.steps[from].values === null) return null;
    const found = [];
    for (let i = from; i >= step; i -= 1) {
      if (this.steps[i].structure !== structure) continue;
      if (this.steps[i].values === null) return null;
      for (const [number_, value] of Object.entries(this.steps[i].values)) found[number_] = value;
    }
    return found;
  }

  async blob(name) {
    if (!this.blobs.has(name)) {
      const section = this.sections[name];
      this.blobs.set(name, typeof section === "string" ? inflated(section) : Promise.resolve(section));
    }
    return this.blobs.get(name);
  }

  statisticsOf(step) {
    return this.rows.get(step) ?? null;
  }

  /** Statistics of one step: a function from number of tensor to {min, max, mean, rms, nan, inf}, or null. */
  async statistics(step) {
    const found = this.statisticsOf(step);
    if (!found) return null;
    const data = await this.blob("statistics");
    const odd = new Map(found.odd.map(([i, nan, inf]) => [i, { nan, inf }]));
    const bits = new DataView(new ArrayBuffer(4));
    const read = (column, i) => {
      for (let plane = 0; plane < 4; plane += 1) {
        bits.setUint8(plane, data[found.at + (column * 4 + plane) * found.rows + i]);
      }
      return bits.getFloat32(0, true);
    };
    const row = (i) => ({
      min: read(0, i),
      max: read(1, i),
      mean: read(2, i),
      rms: read(3, i),
      nan: odd.get(i)?.nan ?? 0,
      inf: odd.get(i)?.inf ?? 0,
    });
    return { row, read, exact: found.exact, rows: found.rows, odd, histograms: found.histograms };
  }

  /** Whether it is known of some steps how much of them is new. */
  get knowsNew() {
    return this.isIncremental || this.record.changes.length > 0;
  }

  changeOf(before, after) {
    return this.pairs.get(`${before}:${after}`) ?? null;
  }

  /** The step before one that can be compared with it; -1 where there is none. */
  before(step) {
    for (let i = step - 1; i >= 0; i -= 1) {
      if (this.steps[i].structure >= 0 && ["whole", "unhealthy"].includes(this.steps[i].state)) return i;
    }
    return -1;
  }

  /**
   * Where saves are incremental, the bytes that the save of a step wrote. Else those in blocks that the step before
   * does not have; null where the two were not compared.
   */
  newBytes(step) {
    if (this.isIncremental) return this.steps[step].new_bytes;
    return this.changeOf(this.before(step), step)?.changed_bytes ?? null;
  }
}

/** What is picked now. Panels read it; `pickStep` and `pickTensor` change it. */
const view = { data: null, step: 0, key: null, tab: "", follows: true, theme: "system" };
const panels = {};
