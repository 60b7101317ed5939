// Text, numbers and elements. Text of a checkpoint becomes part of the page only through `shown` and textContent.

const INVISIBLE = new RegExp(
  "[\\ud800-\\udbff][\\udc00-\\udfff]|[\\u0000-\\u001f\\u007f-\\u00a0\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5" +
    "\\u180b-\\u180f\\u2000-\\u200f\\u2028-\\u202f\\u205f-\\u206f\\u3000\\u3164\\ud800-\\udfff\\ufe00-\\ufe0f\\ufeff" +
    "\\uffa0\\ufff0-\\uffff]",
  "g",
);

const MOST_SHOWN = 4000;

/** The text with all that cannot be seen, or that turns the text around, spelled out: `\u{202e}`. A long one is cut. */
function shown(text) {
  const all = String(text);
  const some = all.slice(0, MOST_SHOWN);
  const safe = /^[\x20-\x7e]*$/.test(some) ? some : spelled(some);
  return all.length > MOST_SHOWN ? `${safe}… and ${whole(all.length - MOST_SHOWN)} more letters` : safe;
}

function spelled(text) {
  const visible = text.replace(INVISIBLE, (sign) => {
    const hidden = sign.length === 1 || /[\p{C}\p{M}]/u.test(sign);
    return hidden ? `\\u{${sign.codePointAt(0).toString(16)}}` : sign;
  });
  return visible.replace(/(\p{M}{3})\p{M}+/gu, "$1…"); // accents on accents would cover other lines
}

/** The text, cut in the middle if it is long. */
function shortened(text, letters = 60) {
  const safe = shown(text);
  if (safe.length <= letters) return safe;
  const half = Math.floor((letters - 1) / 2);
  return `${safe.slice(0, half)}…${safe.slice(safe.length - half)}`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];

function bytes(count) {
  if (count === null || count === undefined || Number.isNaN(count)) return "–";
  let unit = 0;
  let number = Math.abs(count);
  while (number >= 999.5 && unit < UNITS.length - 1) {
    number /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  return `${count < 0 ? "−" : ""}${number.toFixed(digits)} ${UNITS[unit]}`;
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 20 });

function whole(count) {
  return WHOLE.format(count);
}

/** A number with a few digits that count; a dash for none. */
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3)
    return Number(value.toPrecision(digits)).toExponential().replace("+", "").replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return value < 1e9 ? `${(value / 3600).toFixed(1)} h` : `${number(value, 3)} s`;
}

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share === 1) return "100 %";
  return `${(100 * share).toFixed(share < 0.1 || share > 0.995 ? 1 : 0)} %`;
}

function when(text) {
  const time = new Date(text);
  if (!text || Number.isNaN(time.getTime())) return shown(text || "–");
  const two = (n) => String(n).padStart(2, "0");
  const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  return `${day} ${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

function age(from, to) {
  const passed = (new Date(to) - new Date(from)) / 1000;
  if (!Number.isFinite(passed)) return "–";
  if (passed < 60) return `${Math.max(0, Math.round(passed))} s`;
  if (passed < 5400) return `${Math.round(passed / 60)} min`;
  if (passed < 172800) return `${Math.round(passed / 3600)} h`;
  return `${Math.round(passed / 86400)} days`;
}

function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

function boxText(box) {
  return `[${box.offset.map((start, d) => `${start}:${start + box.shape[d]}`).join(", ")}]`;
}

function shapeText(shape) {
  return shape.length ? shape.join(" × ") : "scalar";
}

function rankText(ranks, most = 6) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const texts = runs.slice(0, most).map(([a, b]) => (a === b ? String(a) : `${a}–${b}`));
  return texts.join(", ") + (runs.length > most ? ", …" : "");
}

/** An element. `about`: attributes, `class`, `dataset` and `on…` listeners; `inside`: elements and text. */
function element(name, about = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "dataset") Object.assign(made.dataset, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...inside.flat().filter((part) => part !== null && part !== undefined));
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

/** A list of terms and descriptions from pairs; a description is text or an element. */
function facts(pairs) {
  const rows = pairs.filter((pair) => pair && pair[1] !== "" && pair[1] !== null && pair[1] !== undefined);
  return element(
    "dl",
    { class: "facts" },
    rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

/** A table of texts or elements. `classes`: of the cells of each column. */
function plainTable(heads, rows, classes) {
  const head = heads.map((name, i) => element("th", { scope: "col", class: classes[i] }, name));
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      row.map((cell, i) => element("td", { class: classes[i] }, cell)),
    ),
  );
  return element(
    "table",
    { class: "plain" },
    element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, body),
  );
}

/** The same in a part of the page that scrolls by itself. */
function scrollTable(label, ...table) {
  const about = { class: "scroll", tabindex: 0, role: "region", "aria-label": label };
  return element("div", about, plainTable(...table));
}

/** A key whose last names stay in sight where there is no room for all of it. */
function keyCell(text) {
  const key = shortened(text, 400);
  const dot = key.indexOf(".", key.length - 24);
  let cut = dot < 0 ? key.length - 20 : dot;
  if (cut < 8) return key;
  if (/[\udc00-\udfff]/.test(key[cut])) cut += 1;
  return element(
    "span",
    { class: "key-cell" },
    element("span", { class: "key-head" }, key.slice(0, cut)),
    element("span", { class: "key-tail" }, key.slice(cut)),
  );
}
