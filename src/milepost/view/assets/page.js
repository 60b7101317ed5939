// The page: starts, keeps what is picked, moves between its parts.
//
// What tests may rely on:
//   document.documentElement.dataset.ready   "true" when the first part is drawn; performance mark "milepost-ready"
//   #main     aria-busy="true" while something that was asked for is not drawn yet
//   tabs      #tab-timeline #tab-tensors #tab-layout #tab-statistics #tab-changes (role=tab, aria-selected)
//   parts     #panel-timeline #panel-tensors #panel-layout #panel-statistics #panel-changes (role=tabpanel, hidden)
//   step      #step-select (a select whose values are places in the list of steps), #step-previous, #step-next
//   timeline  #tiles, #timeline-chart (role=slider: arrow keys pick a step), #steps-table (role=grid), #step-details
//   tensors   #search, #tree (role=treegrid: rows .list-row, aria-level, aria-expanded), #tree-count, #tensor-details,
//             #treemap, #treemap-path
//   layout    #layout-tensor, #layout-map, #layout-boxes (role=grid), #mesh-shape, #mesh-cut-0 ..., #mesh-problem,
//             #reads-scope, #reads-table (role=grid), #reads-summary, #reads-detail
//   numbers   #statistics-table (role=grid), #statistics-search, #history-chart, #history-table, #statistics-note
//   changes   #changes-from, #changes-to, #changes-measure, #changes-map, #changes-table (role=grid), #changes-summary,
//             #changes-values, #changes-note
//   always    #status (aria-live: what was picked), #problem (role=alert), #notes (what was left out), #theme-toggle
//   window.milepost   {pick, explain, explainAll, found, plan, pieces, bin, data, view}: see the end of this file
//
// Lists draw only the rows in sight: ask aria-rowcount how many there are, and #tree-count how many match.

const TABS = ["timeline", "tensors", "layout", "statistics", "changes"];
const started = new Set();

function announce(text) {
  byId("status").textContent = text;
}

function fillSteps(select) {
  const options = view.data.steps.map((step, i) => {
    const mark = step.state === "whole" ? "" : ` (${stateOf(step)})`;
    return element("option", { value: i }, `${view.data.label(i)}${mark}`);
  });
  select.replaceChildren(...options.reverse());
}

function pickStep(i) {
  if (i === view.step) return;
  view.step = i;
  view.follows = i === newestShown(view.data);
  showPicks();
  refresh();
  announce(`${stepSentence(i)} selected`);
}

function pickTensor(key) {
  view.key = key;
  announce(`Tensor ${shortened(key, 400)} selected`);
  refresh();
}

let tasks = 0;

/** Run a task. The page is marked as busy until it ends, and what goes wrong in it is shown. */
async function whileBusy(task) {
  tasks += 1;
  byId("main").setAttribute("aria-busy", "true");
  try {
    await task();
  } catch (error) {
    showProblem(error);
  }
  tasks -= 1;
  if (!tasks) byId("main").removeAttribute("aria-busy");
}

/** Show what is picked. `scroll`: bring it into sight. */
function refresh({ scroll = true } = {}) {
  if (!view.data.steps.length) return undefined;
  return whileBusy(async () => {
    await panels[view.tab].update({ scroll });
    keepPlace();
  });
}

function showPicks() {
  byId("step-select").value = view.step;
  byId("step-previous").disabled = view.step <= 0;
  byId("step-next").disabled = view.step >= view.data.steps.length - 1;
}

function showTab(name, focus = false) {
  if (view.tab === name) return undefined;
  view.tab = name;
  for (const tab of TABS) {
    const button = byId(`tab-${tab}`);
    const isPicked = tab === name;
    button.setAttribute("aria-selected", String(isPicked));
    button.tabIndex = isPicked ? 0 : -1;
    byId(`panel-${tab}`).hidden = !isPicked || !view.data.steps.length;
    if (isPicked) button.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    if (isPicked && focus) button.focus();
  }
  startTab();
  return refresh();
}

function startTab() {
  if (started.has(view.tab) || !view.data.steps.length) return;
  started.add(view.tab);
  byId(`panel-${view.tab}`).hidden = false;
  panels[view.tab].start();
}

/** The place in the address: which part, step and tensor are shown. It survives a reload, and can be passed on. */
function keepPlace() {
  const place = new URLSearchParams({ part: view.tab });
  if (view.data.record.is_run && !view.follows) place.set("step", view.data.steps[view.step].name);
  if (view.key !== null && view.key.length < 500) place.set("tensor", view.key);
  if (`#${place}` !== location.hash) history.replaceState(null, "", `#${place}`);
}

function goToPlace() {
  const place = new URLSearchParams(location.hash.slice(1));
  const at = view.data.steps.findIndex((step) => step.name === place.get("step"));
  if (at >= 0) view.step = at;
  view.follows = view.step === newestShown(view.data);
  const key = place.get("tensor");
  if (key !== null && view.data.shape(view.step)?.index.has(key)) view.key = key;
  const tab = place.get("part");
  return TABS.includes(tab) && !byId(`tab-${tab}`).hidden ? tab : "timeline";
}

const THEMES = {
  system: { text: "as the system", path: "M2 3.5h12v7.5H2zM6 14h4M8 11v3" },
  light: {
    text: "light",
    path: "M8 4.8a3.2 3.2 0 1 1 0 6.4 3.2 3.2 0 0 1 0-6.4zM8 .8v1.6M8 13.6v1.6M.8 8h1.6M13.6 8h1.6M2.9 2.9l1.1 1.1M12 12l1.1 1.1M2.9 13.1 4 12M12 4l1.1-1.1",
  },
  dark: { text: "dark", path: "M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3z" },
};
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function applyTheme(choice) {
  view.theme = choice;
  setDark(choice === "dark" || (choice === "system" && prefersDark.matches));
  const about = { d: THEMES[choice].path, fill: "none", stroke: "currentColor", "stroke-width": "1.4" };
  const button = byId("theme-toggle");
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  icon.setAttribute("viewBox", "0 0 16 16");
  icon.setAttribute("aria-hidden", "true");
  const round = { "stroke-linecap": "round", "stroke-linejoin": "round" };
  for (const [name, value] of Object.entries({ ...about, ...round })) path.setAttribute(name, value);
  icon.append(path);
  button.replaceChildren(icon);
  button.setAttribute("aria-label", `Theme: ${THEMES[choice].text}`);
  button.title = `Theme: ${THEMES[choice].text}`;
}

function setDark(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  forgetColours();
  for (const name of started) panels[name].recolour?.();
  for (const chart of charts) if (chart.drawing) chart.draw();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  applyTheme(names[(names.indexOf(view.theme) + 1) % names.length]);
  announce(`Theme: ${THEMES[view.theme].text}`);
  try {
    localStorage.setItem("milepost-theme", view.theme);
  } catch {
    // a browser that keeps nothing
  }
}

function keptTheme() {
  try {
    const kept = localStorage.getItem("milepost-theme");
    return kept !== null && Object.hasOwn(THEMES, kept) ? kept : "system";
  } catch {
    return "system";
  }
}

function showProblem(error) {
  const problem = byId("problem");
  problem.hidden = false;
  problem.textContent = `This cannot be shown: ${shown(error?.message ?? error)}.`;
  console.error(error);
}

function listen() {
  TABS.forEach((tab) => byId(`tab-${tab}`).addEventListener("click", () => showTab(tab)));
  document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => {
    const seen = TABS.filter((tab) => !byId(`tab-${tab}`).hidden);
    const at = seen.indexOf(view.tab);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1 + seen.length, Home: 0, End: seen.length - 1 };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    showTab(seen[moves[event.key] % seen.length], true);
  });
  byId("step-select").addEventListener("change", (event) => pickStep(Number(event.target.value)));
  byId("step-previous").addEventListener("click", () => pickStep(Math.max(0, view.step - 1)));
  byId("step-next").addEventListener("click", () => pickStep(Math.min(view.data.steps.length - 1, view.step + 1)));
  byId("theme-toggle").addEventListener("click", nextTheme);
  prefersDark.addEventListener("change", () => applyTheme(view.theme));
  document.addEventListener("keydown", onPageKey);
  window.addEventListener("beforeprint", () => printAll(true));
  window.addEventListener("afterprint", () => printAll(false));
}

/** Paper is light, and lists on it do not scroll. */
function printAll(isPrinted) {
  for (const list of lists) list.print(isPrinted);
  if (isPrinted) setDark(false);
  else applyTheme(view.theme);
}

function onPageKey(event) {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    showTab("tensors");
    byId("search").focus();
    byId("search").select();
  } else if (event.key === "Escape" && event.target.type === "search") {
    event.preventDefault();
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    byId(event.target.id === "search" ? "tree" : "statistics-table").focus();
  }
}

function showHead() {
  const { record, steps, usable } = view.data;
  const name = shortened(record.source, 400);
  document.title = `${name.split("/").filter(Boolean).slice(-1)[0] ?? name} · Milepost`;
  byId("source").textContent = name;
  byId("source").title = name;
  const newest = steps[usable[usable.length - 1] ?? steps.length - 1];
  const parts = record.is_run ? [plural(steps.length, "step")] : newest ? [shown(newest.format)] : [];
  if (newest?.world) parts.push(plural(newest.world, "rank"));
  if (newest?.size_bytes) parts.push(bytes(newest.size_bytes));
  if (!live.at) parts.push(`made ${when(record.made)}`);
  byId("summary").textContent = parts.join(" · ");
  byId("made").textContent =
    `Made by ${shown(record.made_by)} at ${when(record.made)} from manifests and tables of checksums.` +
    " Nothing here is loaded from elsewhere. Charts: Apache ECharts.";
  const notes = record.notes.map((note) => element("p", {}, shown(note)));
  byId("notes").replaceChildren(...(notes.length ? [element("div", { class: "notice" }, notes)] : []));
  byId("step-picker").hidden = !record.is_run || !steps.length;
  byId("tab-changes").hidden = usable.length < 2;
  byId("nothing").hidden = steps.length > 0;
  if (!record.is_run) byId("tab-timeline").textContent = "Overview";
  fillSteps(byId("step-select"));
}

/** The newest step that is whole, or the newest. */
function newestShown(data) {
  return data.usable[data.usable.length - 1] ?? data.steps.length - 1;
}

async function start() {
  applyTheme(keptTheme());
  view.data = await PageData.fromPage();
  view.step = newestShown(view.data);
  live.start();
  showHead();
  listen();
  showPicks();
  const drawn = showTab(goToPlace());
  showPicks();
  await drawn;
  requestAnimationFrame(() => {
    document.documentElement.dataset.ready = "true";
    performance.mark("milepost-ready");
  });
}

/** What tests and the console may ask. Boxes are {offset, shape}; cuts are null or {dim, stride}. */
window.milepost = {
  view,
  get data() {
    return view.data;
  },
  /** Pick a step by its number, as a click does. */
  pick: (number_) => pickStep(view.data.steps.findIndex((step) => step.step === number_)),
  /** The leaves that the search finds: [{key, kind}]. */
  found: () => tensors.found.map(({ key, kind }) => ({ key, kind })),
  /** What each rank of another mesh reads of a tensor: [{rank, pieces, reads: [{rank, name, source, box, bytes}], bytes}]. */
  explain({ step = view.step, key, mesh, cuts, ranks = null }) {
    const shape = view.data.shape(step);
    const tensor = shape.tensor(shape.index.get(key));
    return explainTensor(tensor, shape.layouts[tensor.layout], gridOf(mesh, cuts, tensor.shape.length, ranks));
  },
  /** The same of all tensors: [{rank, bytes, count, sources}]. */
  explainAll({ step = view.step, mesh, cuts }) {
    const work = explainAll(view.data.shape(step), mesh, cuts);
    let one = work.next();
    while (!one.done) one = work.next();
    return one.value;
  },
  /** `read_plan` of a tensor {key, shape, parts, turn, stored} with a layout of a manifest. */
  plan: readPlan,
  pieces: piecesOf,
  /** The rows of the table of changes: [{key, what, share, bytes}], and the values that differ. */
  changes: () => changes.rows.map(({ key, what, share, bytes: size }) => ({ key, what, share, bytes: size })),
  differingValues: () => changes.differing().map(([key, before, after]) => ({ key, before, after })),
  /** The limits of a bin of a histogram. */
  bin: binRange,
};

whileBusy(start);
