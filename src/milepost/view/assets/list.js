// A list of any length of which only the rows in sight exist. Keyboard: arrows, page keys, Home, End, Enter, Space.

const ROW_HEIGHT = 30;
const MOST_HEIGHT = 15_000_000;
/** Browsers draw nothing below some 16 million pixels; longer lists end with a note. */
const MOST_PRINTED = 300;
const lists = new Set();

class VirtualList {
  /**
   * `columns`: {name, class, width?, cell(row) -> text or nodes, title?, sort?}. `onPick(row)`: a row was clicked, or
   * Enter. `onActive(row)`: the cursor moved onto it. `onKey(event, row)`: true if it was handled. `onSort(column)`.
   * `tree(row)`: {level, expanded}.
   */
  constructor(host, options) {
    this.host = host;
    this.options = options;
    this.rows = [];
    this.active = 0;
    this.picked = null;
    this.drawn = new Map();
    this.build();
    lists.add(this);
  }

  build() {
    const { label, tree } = this.options;
    this.head = element("div", { class: "list-head", role: "row", "aria-rowindex": 1 });
    this.space = element("div", { class: "list-space", role: "presentation" });
    this.body = element("div", { class: "list-body", role: "rowgroup" }, this.space);
    this.empty = element("p", { class: "list-empty", hidden: true }, "Nothing matches.");
    this.host.classList.add("list");
    this.host.setAttribute("role", tree ? "treegrid" : "grid");
    this.host.setAttribute("aria-label", label);
    this.host.tabIndex = -1;
    const top = element("div", { role: "rowgroup", class: "list-top" }, this.head);
    this.host.replaceChildren(element("div", { class: "list-wide", role: "presentation" }, top, this.body), this.empty);
    this.setColumns(this.options.columns);
    this.body.addEventListener("scroll", () => this.draw(), { passive: true });
    this.host.addEventListener("keydown", (event) => this.onKeyDown(event));
    this.host.addEventListener("focus", () => this.drawn.get(this.active)?.focus({ preventScroll: true }));
    this.body.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  setColumns(columns) {
    this.options.columns = columns;
    this.host.setAttribute("aria-colcount", columns.length);
    const widths = columns.map((column) => column.width ?? "1fr");
    const least = widths.map((width) => Number(/minmax\((\d+)px/.exec(width)?.[1] ?? 0));
    this.host.style.setProperty("--columns", widths.join(" "));
    // Narrower than this, the list scrolls sideways: its columns, the gaps between them, and its sides.
    this.host.style.setProperty("--least", `${least.reduce((all, one) => all + one + 12, 8)}px`);
    this.head.replaceChildren(...columns.map((column, i) => this.headCell(column, i)));
  }

  headCell(column, i) {
    const about = { role: "columnheader", class: `cell head ${column.class ?? ""}`, "aria-colindex": i + 1 };
    const name = column.name || element("span", { class: "unseen" }, column.label);
    if (!column.sort) return element("div", about, name);
    const button = element("button", { type: "button", class: "sort" }, column.name);
    button.addEventListener("click", () => this.options.onSort(column, this));
    column.head = element("div", { ...about, "aria-sort": "none" }, button);
    return column.head;
  }

  /** Say at the heads which column the rows are sorted by. */
  showSorted({ column, sign }) {
    for (const one of this.options.columns)
      one.head?.setAttribute("aria-sort", one === column ? (sign > 0 ? "ascending" : "descending") : "none");
    announce(`Sorted by ${column.name}, ${sign > 0 ? "smallest" : "largest"} first`);
  }

  show(rows, { keep = false } = {}) {
    const scroll = this.body.scrollTop;
    this.rows = rows;
    this.active = Math.min(this.active, Math.max(0, rows.length - 1));
    this.host.setAttribute("aria-rowcount", rows.length + 1);
    this.host.style.setProperty("--rows", Math.min(rows.length, 100));
    this.space.style.height = `${Math.min(rows.length * ROW_HEIGHT, MOST_HEIGHT)}px`;
    this.empty.hidden = rows.length > 0;
    this.body.hidden = rows.length === 0;
    this.clear();
    this.body.scrollTop = keep ? scroll : 0;
    this.draw();
  }

  clear() {
    this.hadFocus = this.hadFocus || document.activeElement?.parentNode === this.space;
    for (const row of this.drawn.values()) row.remove();
    this.drawn.clear();
  }

  redraw() {
    this.clear();
    this.draw();
  }

  /** The numbers of the rows that are in sight, and some around them. */
  inSight() {
    if (this.host.classList.contains("printed")) return [0, Math.min(this.rows.length, MOST_PRINTED)];
    const height = this.body.clientHeight;
    const top = this.body.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - 6);
    return height ? [first, Math.min(this.rows.length, Math.ceil((top + height) / ROW_HEIGHT) + 6)] : [0, 0];
  }

  draw() {
    const [first, last] = this.inSight();
    const isWanted = (i) => (i >= first && i < last) || i === this.active; // the row with the focus stays
    for (const [i, row] of this.drawn) {
      if (!isWanted(i)) {
        row.remove();
        this.drawn.delete(i);
      }
    }
    for (let i = first; i < last; i += 1) this.drawRow(i);
    if (this.active < this.rows.length && last > first) this.drawRow(this.active);
    this.mark();
  }

  drawRow(i) {
    if (this.drawn.has(i)) return;
    const row = this.makeRow(i);
    this.drawn.set(i, row);
    this.space.append(row);
  }

  makeRow(i) {
    const { columns, tree } = this.options;
    const row = this.rows[i];
    const made = element("div", { class: "list-row", role: "row", "aria-rowindex": i + 2 });
    made.id = `${this.host.id}-row-${i}`;
    made.dataset.row = i;
    made.style.transform = `translateY(${i * ROW_HEIGHT}px)`;
    if (tree) {
      const { level, expanded } = tree(row);
      made.setAttribute("aria-level", level + 1);
      if (expanded !== undefined) made.setAttribute("aria-expanded", String(expanded));
    }
    columns.forEach((column, c) => {
      const cell = element("div", { class: `cell ${column.class ?? ""}`, role: "gridcell", "aria-colindex": c + 1 });
      cell.append(...[column.cell(row)].flat());
      if (column.title) cell.title = column.title(row);
      made.append(cell);
    });
    return made;
  }

  mark() {
    for (const [i, row] of this.drawn) {
      row.tabIndex = i === this.active ? 0 : -1;
      const isPicked = this.picked !== null && this.options.same(this.rows[i], this.picked);
      row.setAttribute("aria-selected", String(isPicked));
    }
    if (this.hadFocus) this.focus();
    this.hadFocus = false;
  }

  /** Give the focus to the row where the cursor is. */
  focus() {
    (this.drawn.get(this.active) ?? this.host).focus({ preventScroll: true });
  }

  /** Mark a row as picked, and bring it into sight. */
  pick(row, { scroll = true } = {}) {
    this.picked = row;
    const i = this.rows.findIndex((one) => this.options.same(one, row));
    if (i >= 0) this.activate(i, scroll);
    else this.mark();
  }

  activate(i, scroll = true) {
    this.hadFocus = document.activeElement?.parentNode === this.space;
    this.active = i;
    if (scroll) {
      const top = i * ROW_HEIGHT;
      const height = this.body.clientHeight;
      if (top < this.body.scrollTop) this.body.scrollTop = top;
      else if (top + ROW_HEIGHT > this.body.scrollTop + height) this.body.scrollTop = top + ROW_HEIGHT - height;
    }
    this.draw();
  }

  onClick(event) {
    const row = event.target.closest(".list-row");
    if (!row) return;
    const i = Number(row.dataset.row);
    this.activate(i, false);
    this.options.onPick?.(this.rows[i], event);
  }

  onKeyDown(event) {
    const isOurs = event.target === this.host || event.target.parentNode === this.space;
    if (!isOurs || event.altKey || event.ctrlKey || event.metaKey || !this.rows.length) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW_HEIGHT) - 1);
    const last = this.rows.length - 1;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last };
    if (Object.hasOwn(moves, event.key)) {
      this.activate(Math.max(0, Math.min(last, this.active + moves[event.key])));
      this.options.onActive?.(this.rows[this.active]);
    } else if (event.key === "Enter" || event.key === " ") {
      this.options.onPick?.(this.rows[this.active], event);
    } else if (!this.options.onKey?.(event, this.rows[this.active], this)) {
      return;
    }
    event.preventDefault();
  }

  /** On paper the first rows stand below each other, and nothing scrolls. */
  print(isPrinted) {
    this.host.classList.toggle("printed", isPrinted);
    const more = this.rows.length - MOST_PRINTED;
    this.empty.hidden = isPrinted ? more <= 0 : this.rows.length > 0;
    this.empty.textContent = isPrinted ? `${whole(more)} more rows are not printed.` : "Nothing matches.";
    this.clear();
    this.draw();
  }
}
