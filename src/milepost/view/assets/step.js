// One step: its state, times, metrics and metadata; and the tiles above the timeline.

const STATES = ["whole", "unhealthy", "damaged", "unreadable", "unfinished", "removed"];
const STATE_SIGNS = {
  unhealthy: "triangle",
  damaged: "diamond",
  unreadable: "diamond",
  unfinished: "circle",
  removed: "circle",
};

/** The state of a step, as one of those that the page knows. */
function stateOf(step) {
  return STATES.includes(step.state) ? step.state : "unreadable";
}

function stateColour(state) {
  return colour({ whole: "accent-bar", unhealthy: "warn-bar", damaged: "bad", unreadable: "bad" }[state] ?? "faint");
}

function phaseOf(step, name, kind) {
  const found = step.phases.find((phase) => phase[0] === name);
  return found ? found[kind === "median" ? 1 : 2] : 0;
}

function totalOf(step, kind) {
  if (!step.phases.length) return null;
  return step.phases.reduce((all, phase) => all + phase[kind === "median" ? 1 : 2], 0);
}

function verifiedText(step) {
  return step.verified ? `${age(step.verified, view.data.now)} ago` : "–";
}

function stateMark(step) {
  const state = stateOf(step);
  return element("span", { class: `state ${state}` }, state === "removed" ? "being removed" : state);
}

function stepSentence(i) {
  const step = view.data.steps[i];
  const what = step.step === null ? "Checkpoint" : `Step ${view.data.label(i)}`;
  return `${what}, ${stateOf(step)}, ${bytes(step.size_bytes || null)}`;
}

function tile(name, value, more = "", bad = false) {
  return element(
    "div",
    { class: bad ? "tile bad" : "tile" },
    element("div", { class: "tile-name" }, name),
    element("div", { class: "tile-value" }, value),
    element("div", { class: "tile-more" }, more),
  );
}

function showTiles() {
  const { data } = view;
  const good = data.steps.findLastIndex((step) => step.state === "whole");
  const at = data.usable[data.usable.length - 1] ?? -1;
  const newest = data.steps[at] ?? null;
  const tiles = data.record.is_run ? runTiles(good) : [];
  if (newest) {
    const of = data.record.is_run && at !== data.steps.length - 1 ? ` in step ${data.label(at)}` : "";
    const all = data.record.file_bytes ?? 0;
    const files =
      newest.format === "milepost" ? plural(data.files(at)?.rank.length ?? 0, "file") : shown(newest.format);
    tiles.push(tile("Size", bytes(newest.size_bytes), data.record.is_run ? `${bytes(all)} in all steps` : files));
    tiles.push(tile("Ranks", whole(newest.world), data.record.is_run ? `${files}${of}` : ""));
    const shape = data.shape(at);
    if (shape) tiles.push(tile("Tensors", whole(shape.count), plural(shape.record.value_keys.length, "value")));
  }
  tiles.push(...saveTile());
  byId("tiles").replaceChildren(...tiles);
}

function runTiles(good) {
  const { data } = view;
  const step = data.steps[good];
  const passed = step ? age(step.created, data.now) : "";
  const since = passed === "–" ? "at an unknown time" : `saved ${passed} ${live.at ? "ago" : "before this page"}`;
  const saved = step ? since : "no step can be restored";
  return [
    tile("Newest whole step", step ? data.label(good) : "none", saved, !step),
    tile("Steps", whole(data.steps.length), stateCounts()),
  ];
}

function saveTile() {
  const { data } = view;
  const times = data.steps.map((step) => totalOf(step, "slowest")).filter((time) => time !== null);
  if (!times.length) return [];
  times.sort((a, b) => a - b);
  const more = data.record.is_run ? `median; longest ${seconds(times[times.length - 1])}` : "slowest ranks";
  return [tile("Save time", seconds(times[Math.floor(times.length / 2)]), more)];
}

function stateCounts() {
  const counts = new Map();
  for (const step of view.data.steps) {
    const state = stateOf(step);
    if (state !== "whole") counts.set(state, (counts.get(state) ?? 0) + 1);
  }
  return [...counts].map(([state, count]) => `${count} ${state}`).join(", ") || "all whole";
}

/** Nested metadata as a list of lists; plain lists in one line. */
function nested(data, depth = 0) {
  if (data === null || typeof data !== "object") return document.createTextNode(shown(data === null ? "none" : data));
  const pairs = Array.isArray(data) ? data.map((value, i) => [i, value]) : Object.entries(data);
  if (!pairs.length) return document.createTextNode("empty");
  if (Array.isArray(data) && data.every((one) => one === null || typeof one !== "object")) {
    const more = data.length > 200 ? `, … ${data.length - 200} more` : "";
    return document.createTextNode(shown(data.slice(0, 200).join(", ")) + more);
  }
  const rows = pairs
    .slice(0, 200)
    .map(([name, value]) =>
      element(
        "li",
        {},
        element("span", { class: "name" }, `${shown(name)}: `),
        depth > 10 ? "…" : nested(value, depth + 1),
      ),
    );
  if (pairs.length > 200) rows.push(element("li", {}, `… ${pairs.length - 200} more`));
  return element("ul", { class: "nested" }, rows);
}

function showStep() {
  const { data } = view;
  const step = data.steps[view.step];
  byId("step-heading").textContent = step.step === null ? "Checkpoint" : `Step ${data.label(view.step)}`;
  const isBad = ["damaged", "unreadable"].includes(stateOf(step));
  const parts = [];
  if (step.reason) parts.push(element("p", { class: isBad ? "notice bad" : "notice" }, shown(step.reason)));
  if (step.unhealthy_because)
    parts.push(element("p", { class: "notice" }, `Unhealthy: ${shown(step.unhealthy_because)}`));
  parts.push(facts(stepFacts(step)));
  if (step.metrics.size) {
    const told = ([name, value]) => [shown(name), value === null ? "not a number" : number(value, 6)];
    parts.push(element("h4", {}, "Metrics"), facts([...step.metrics].slice(0, 200).map(told)));
  }
  if (step.phases.length) parts.push(element("h4", {}, "Phases of the save"), phaseTable(step));
  const rest = Object.entries(step.metadata).filter(([name]) => name !== "metrics");
  if (rest.length) parts.push(element("h4", {}, "Metadata"), nested(Object.fromEntries(rest)));
  byId("step-details").replaceChildren(...parts);
}

function stepFacts(step) {
  const { data } = view;
  const before = data.before(view.step);
  const change = data.changeOf(before, view.step);
  return [
    ["State", stateMark(step)],
    ["Size", bytes(step.size_bytes || null)],
    data.isIncremental ? ["New bytes", writtenText(step.new_bytes)] : null,
    step.reused ? ["Reused", reusedText(step.reused)] : null,
    change ? [data.isIncremental ? "Changed" : "New bytes", newText(change, data.label(before))] : null,
    ["Ranks", step.world ? whole(step.world) : ""],
    ["Saved", step.created ? when(step.created) : ""],
    ["Kept because", shown(step.kept.join(", "))],
    ["Verified", step.verified ? when(step.verified) : ""],
    ["Format", `${shown(step.format)}${step.generation ? `, generation ${step.generation}` : ""}`],
    ["Written by", shown(step.writer ?? "")],
    ["Place", element("span", { class: "mono" }, shown(step.url ?? ""))],
  ];
}

function newText(change, before) {
  const least = change.unknown_bytes ? "at least " : "";
  return `${least}${bytes(change.changed_bytes)} since step ${before}`;
}

function writtenText(size) {
  return size === null ? "" : `${bytes(size)}, written by this save`;
}

/** `4.2 MB in 3 files of 2 earlier saves, the oldest 5 saves ago`. */
function reusedText({ data_bytes: size, files, saves, oldest_age: age_ }) {
  const from = `${bytes(size)} in ${plural(files, "file")} of ${plural(saves, "earlier save")}`;
  return `${from}, ${saves > 1 ? "the oldest " : ""}${plural(age_, "save")} ago`;
}

function phaseTable(step) {
  const rows = step.phases.map(([name, median, slowest, rank]) => [
    shown(name),
    seconds(median),
    seconds(slowest),
    whole(rank),
  ]);
  return plainTable(["phase", "median rank", "slowest rank", "which"], rows, ["", "num", "num", "num"]);
}
