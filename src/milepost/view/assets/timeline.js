// The timeline: its controls, and the table of steps.

const timeline = {
  metrics: [],
  named: null,
  chosen: new Set(),
  phaseKind: "slowest",
  byNumber: false,
  chart: null,
  list: null,
  sorted: null,
  drawn: null,

  start() {
    this.chart = new TimelineChart(byId("timeline-chart"), this);
    this.findMetrics();
    this.makeControls();
    this.makeList();
    byId("timeline-card").hidden = !view.data.record.is_run;
    byId("steps-card").hidden = !view.data.record.is_run;
    byId("timeline-parts").classList.toggle("split", view.data.record.is_run);
  },

  /** The names of metrics in all steps; the first three are drawn. */
  findMetrics() {
    const known = new Set(this.metrics);
    const found = new Set(view.data.steps.flatMap((step) => [...step.metrics.keys()]));
    this.metrics = [...this.metrics.filter((name) => found.has(name)), ...[...found].filter((one) => !known.has(one))];
    if (!known.size) this.chosen = new Set(this.metrics.slice(0, 3));
    const names = this.metrics.join("\n");
    if (names === this.named) return; // what has the focus there keeps it
    this.named = names;
    const chips = byId("metric-choice");
    chips.hidden = this.metrics.length < 2;
    chips.replaceChildren(...this.metrics.slice(0, 24).map((name) => this.chip(name)));
    const more = this.metrics.length - 24;
    if (more > 0) chips.append(element("span", { class: "muted" }, `and ${whole(more)} more, shown with each step`));
  },

  chip(name) {
    const box = element("input", { type: "checkbox" });
    box.checked = this.chosen.has(name);
    box.addEventListener("change", () => {
      if (box.checked) this.chosen.add(name);
      else this.chosen.delete(name);
      this.draw();
    });
    return element("label", { class: "check" }, box, element("span", {}, shortened(name, 32)));
  },

  makeControls() {
    byId("phase-kind").addEventListener("change", (event) => {
      this.phaseKind = event.target.value;
      this.draw();
    });
    byId("timeline-scale").addEventListener("change", (event) => {
      this.byNumber = event.target.checked;
      this.draw();
    });
    byId("timeline-reset").addEventListener("click", () => this.chart.zoomOut());
    byId("timeline-chart").addEventListener("keydown", (event) => {
      const last = view.data.steps.length - 1;
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10 };
      const ends = { Home: 0, End: last };
      const to = Object.hasOwn(moves, event.key) ? view.step + moves[event.key] : ends[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      pickStep(Math.max(0, Math.min(last, to)));
    });
  },

  /** The columns of the table that have something to show. They show whatever data there is. */
  columns() {
    const at = (i) => view.data.steps[i];
    const has = (test) => view.data.steps.some(test);
    const [metric] = this.metrics;
    const sized = (name, worth, cell, more = {}) => ({
      name,
      class: "num",
      width: "minmax(58px, 0.8fr)",
      sort: worth,
      cell,
      ...more,
    });
    const time = (i) => totalOf(at(i), "slowest");
    const columns = [
      sized("step", (i) => i, (i) => view.data.label(i), { width: "minmax(50px, 0.8fr)" }),
      { name: "state", width: "minmax(88px, 1fr)", cell: (i) => stateMark(at(i)) },
      sized(
        "size",
        (i) => at(i).size_bytes,
        (i) => bytes(at(i).size_bytes || null),
      ),
    ];
    if (view.data.knowsNew)
      columns.push(
        sized(
          "new",
          (i) => view.data.newBytes(i),
          (i) => bytes(view.data.newBytes(i)),
        ),
      );
    if (has((step) => step.phases.length)) columns.push(sized("save", time, (i) => seconds(time(i))));
    if (metric !== undefined)
      columns.push(
        sized(
          shortened(metric, 14),
          (i) => at(i).metrics.get(metric),
          (i) => number(at(i).metrics.get(metric)),
        ),
      );
    if (has((step) => step.kept.length))
      columns.push({
        name: "kept because",
        class: "soft",
        width: "minmax(110px, 2.2fr)",
        cell: (i) => shortened(at(i).kept.join(", ") || "–", 80),
        title: (i) => shown(at(i).kept.join(", ")),
      });
    if (has((step) => step.verified))
      columns.push({
        name: "verified",
        class: "num soft",
        width: "minmax(76px, 1fr)",
        cell: (i) => verifiedText(at(i)),
      });
    columns.push({
      name: "age",
      class: "num soft",
      width: "minmax(46px, 0.7fr)",
      cell: (i) => age(at(i).created, view.data.now),
    });
    return columns;
  },

  makeList() {
    this.list = new VirtualList(byId("steps-table"), {
      columns: this.columns(),
      label: "Steps, newest first",
      same: (one, other) => one === other,
      onPick: (i) => pickStep(i),
      onSort: (column) => this.sort(column),
    });
    this.showList();
  },

  sort(column) {
    const again = this.sorted?.column === column;
    this.sorted = { column, sign: again ? -this.sorted.sign : -1 };
    this.list.showSorted(this.sorted);
    this.showList();
  },

  showList({ keep = false } = {}) {
    const { data } = view;
    const rows = data.steps.map((_, i) => data.steps.length - 1 - i);
    if (this.sorted) {
      const { column, sign } = this.sorted;
      const worth = (i) => column.sort(i) ?? -Infinity;
      rows.sort((a, b) => sign * (worth(a) - worth(b)) || b - a);
    }
    this.list.show(rows, { keep });
    byId("steps-count").textContent = plural(data.steps.length, "step");
  },

  /** The same with other data: what is chosen and where the table stands stays. */
  renew() {
    this.findMetrics();
    const columns = this.columns();
    const names = (some) => some.map((column) => column.name).join("\n");
    if (names(columns) !== names(this.list.options.columns)) {
      this.sorted = null;
      this.list.setColumns(columns);
    }
    this.showList({ keep: true });
  },

  recolour() {
    if (view.data.record.is_run) this.chart.showLegend();
  },

  update({ scroll }) {
    showTiles();
    showStep();
    if (!view.data.record.is_run) return;
    this.list.pick(view.step, { scroll });
    const host = byId("timeline-chart");
    host.setAttribute("aria-valuemin", 0);
    host.setAttribute("aria-valuemax", Math.max(0, view.data.steps.length - 1));
    host.setAttribute("aria-valuenow", view.step);
    host.setAttribute("aria-valuetext", stepSentence(view.step));
    if (this.drawn !== view.data) this.draw();
    else this.chart.mark();
  },

  draw() {
    if (!view.data.record.is_run) return;
    this.drawn = view.data;
    byId("phase-kind").hidden = !view.data.steps.some((step) => step.phases.length);
    this.chart.show();
  },
};
panels.timeline = timeline;
