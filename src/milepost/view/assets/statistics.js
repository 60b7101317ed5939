// Statistics of the tensors of a step, those that are not finite first, and what became of one tensor over the steps.

const statistics = {
  list: null,
  rows: [],
  sorted: null,
  query: "",
  drawn: null,
  found: null,
  history: [],

  start() {
    const numeric = (name) => ({
      name,
      class: "num",
      width: "minmax(74px, 0.8fr)",
      sort: (row) => row[name],
      cell: (row) => number(row[name]),
    });
    const count = (name, field) => ({
      name,
      class: "num",
      width: "minmax(38px, 0.4fr)",
      sort: (row) => row[field],
      cell: (row) => oddText(row[field]),
    });
    const key = {
      name: "tensor",
      class: "key",
      width: "minmax(210px, 2.6fr)",
      sort: (row) => -row.index,
      cell: (row) => keyCell(row.key),
      title: (row) => shortened(row.key, 400),
    };
    this.list = new VirtualList(byId("statistics-table"), {
      columns: [key, count("NaN", "nan"), count("Inf", "inf"), ...COLUMNS.map(numeric)],
      label: "Statistics, tensors that are not finite first",
      same: (one, other) => one.key === other.key,
      onPick: (row) => pickTensor(row.key),
      onSort: (column) => this.sort(column),
    });
    byId("statistics-search").addEventListener("input", (event) => {
      this.query = event.target.value.toLowerCase();
      this.show();
    });
    this.curves = new Chart(byId("history-chart"), () => historyChart(this.history));
    this.bars = new Chart(byId("histogram-chart"), () => histogramChart(this.bins()));
  },

  async update() {
    const { data, step } = view;
    const none = !data.record.statistics.length;
    byId("statistics-body").hidden = none;
    if (none) return this.note("No step has statistics. A save with statistics=True records them.");
    const name = `${data.number}:${step}`;
    if (this.drawn !== name) {
      const found = await data.statistics(step);
      if (data !== view.data || step !== view.step) return; // something else was picked meanwhile
      this.drawn = name;
      this.found = found;
      this.rows = found ? this.rowsOf(data.shape(step)) : [];
      this.show({ keep: true });
    }
    this.note(
      this.found ? "" : `Step ${data.label(step)} has no statistics in the page. The curves show the steps that have.`,
    );
    if (view.key === null) view.key = this.rows.length ? this.ordered()[0].key : (this.anyKey() ?? null);
    await this.showHistory();
  },

  recolour() {
    if (this.history.length) whileBusy(() => this.showHistory());
  },

  note(text) {
    byId("statistics-note").textContent = text;
    byId("statistics-note").hidden = !text;
  },

  rowsOf(shape) {
    return shape.record.tensors.keys.map((key, index) => ({
      key,
      index,
      lower: key.toLowerCase(),
      ...this.found.row(index),
    }));
  },

  anyKey() {
    const [first] = view.data.record.statistics;
    return view.data.shape(first.step)?.record.tensors.keys[0];
  },

  ordered() {
    const { sorted } = this;
    const odd = (row) => (row.nan || row.inf ? 0 : 1);
    const rows = this.query ? this.rows.filter((row) => row.lower.includes(this.query)) : [...this.rows];
    if (!sorted) return rows.sort((a, b) => odd(a) - odd(b) || a.index - b.index);
    const { column, sign } = sorted;
    const worth = (row) => (Number.isNaN(column.sort(row)) ? -Infinity : column.sort(row));
    const order = (a, b) => (worth(a) < worth(b) ? -1 : worth(a) > worth(b) ? 1 : 0);
    return rows.sort((a, b) => sign * order(a, b) || a.index - b.index);
  },

  sort(column) {
    this.sorted = { column, sign: this.sorted?.column === column ? -this.sorted.sign : -1 };
    this.list.showSorted(this.sorted);
    this.show();
  },

  show({ keep = false } = {}) {
    const rows = this.ordered();
    this.list.show(rows, { keep });
    const odd = this.rows.filter((row) => row.nan || row.inf).length;
    const rounded = this.found && !this.found.exact ? "; rounded to four digits" : "";
    const state = odd ? `${whole(odd)} not finite` : "all finite";
    byId("statistics-count").textContent = this.rows.length
      ? `${plural(rows.length, "tensor")}, ${state}${rounded}`
      : "none in this step";
    if (view.key !== null) this.list.pick({ key: view.key }, { scroll: false });
  },

  async showHistory() {
    const { data, key } = view;
    const history = [];
    for (const { step } of data.record.statistics) {
      const index = data.shape(step)?.index.get(key);
      if (index !== undefined) history.push({ step, ...(await data.statistics(step)).row(index) });
    }
    if (data !== view.data || key !== view.key) return;
    this.history = history;
    byId("history-key").textContent = key === null ? "" : shortened(key, 4000);
    if (key !== null) this.list.pick({ key }, { scroll: false });
    const isCurve = history.length > 1;
    byId("history-curves").hidden = !isCurve;
    byId("history-now").hidden = isCurve;
    byId("history-now").replaceChildren(...(history.length === 1 ? [this.numbers(history[0])] : []));
    byId("history-chart").style.height = `${historyHeight(history)}px`;
    this.curves.draw();
    const tones = palette();
    const names = [
      ["rms", tones[0]],
      ["mean", tones[2]],
      ["min to max", colour("accent-soft")],
    ];
    const marks = names.map(([name, tone]) => legendEntry(swatch(tone), name));
    if (history.some((row) => row.nan || row.inf)) marks.push(legendEntry(swatch(colour("bad")), "NaN and Inf"));
    byId("history-legend").replaceChildren(...marks);
    this.showTable();
    byId("histogram-part").hidden = !this.bins().length;
    if (this.bins().length) {
      this.bars.draw();
      this.showBins();
    }
  },

  numbers(row) {
    const step = view.data.record.is_run ? [["Step", view.data.label(row.step)]] : [];
    const counts = [
      ["NaN", oddText(row.nan)],
      ["Inf", oddText(row.inf)],
    ];
    return facts([...step, ...COLUMNS.map((name) => [name, number(row[name], 6)]), ...counts]);
  },

  bins() {
    const index = view.data.shape(view.step)?.index.get(view.key) ?? -1;
    return this.found?.histograms[index] ?? [];
  },

  showTable() {
    const rows = [...this.history].reverse().slice(0, 500);
    const cells = rows.map((row) => [
      view.data.label(row.step),
      ...COLUMNS.map((name) => number(row[name])),
      oddText(row.nan),
      oddText(row.inf),
    ]);
    const heads = ["step", ...COLUMNS, "NaN", "Inf"];
    const classes = heads.map(() => "num");
    byId("history-table").replaceChildren(scrollTable("Statistics over the steps", heads, cells, classes));
  },

  showBins() {
    const cells = this.bins().map(([bin, count]) => [binText(bin), whole(count)]);
    byId("histogram-table").replaceChildren(
      scrollTable("Histogram as a table", ["values", "elements"], cells, ["num", "num"]),
    );
  },
};
panels.statistics = statistics;

function historyHeight(history) {
  return history.some((row) => row.nan || row.inf) ? 430 : 340;
}

function historyChart(history) {
  const tones = palette();
  const isOdd = history.some((row) => row.nan || row.inf);
  const at = history.findIndex((row) => row.step === view.step);
  const mark = markAt(at < 0 ? null : at);
  const grids = [
    gridAt({ left: 78, right: 26, top: 24, height: 110 }),
    gridAt({ left: 78, right: 26, top: 176, height: 128 }),
    ...(isOdd ? [gridAt({ left: 78, right: 26, top: 346, height: 56 })] : []),
  ];
  const line = (name, tone, grid, more = {}) => ({
    type: "line",
    name,
    xAxisIndex: grid,
    yAxisIndex: grid,
    symbol: "circle",
    symbolSize: 5,
    showSymbol: history.length < 50,
    data: history.map((row) => (Number.isNaN(row[name]) ? null : row[name])),
    lineStyle: { width: 1.8, color: tone },
    itemStyle: { color: tone },
    ...more,
  });
  const span = { symbol: "none", lineStyle: { width: 0 }, stack: "span", showSymbol: false, silent: true };
  const low = history.map((row) => (Number.isNaN(row.min) ? null : row.min));
  const wide = history.map((row) => (Number.isNaN(row.max - row.min) ? null : row.max - row.min));
  const title = (text, top) => ({
    text,
    left: 2,
    top,
    textStyle: { fontSize: 12, fontWeight: 600, color: colour("soft") },
  });
  const values = [history.map((row) => row.rms), history.flatMap((row) => [row.min, row.max]), []];
  const odd = { type: "bar", name: "NaN and Inf", xAxisIndex: 2, yAxisIndex: 2, barMaxWidth: 22, barMinWidth: 2 };
  return {
    title: [title("rms", 0), title("mean, min and max", 152), ...(isOdd ? [title("NaN and Inf", 322)] : [])],
    grid: grids,
    xAxis: grids.map((_, i) =>
      axis({
        type: "category",
        data: history.map((row) => view.data.label(row.step)),
        gridIndex: i,
        axisLabel: { show: i === grids.length - 1 },
        boundaryGap: isOdd,
      }),
    ),
    yAxis: grids.map((_, i) =>
      axis({
        type: "value",
        gridIndex: i,
        scale: i < 2,
        splitNumber: i < 2 ? 3 : 2,
        minInterval: i < 2 ? 0 : 1,
        axisLine: { show: false },
        axisLabel: { formatter: i < 2 ? digitsFor(values[i]) : whole },
      }),
    ),
    axisPointer: { link: [{ xAxisIndex: "all" }] },
    tooltip: { trigger: "axis", ...tooltip((found) => historyTip(history[found[0]?.dataIndex])) },
    series: [
      line("rms", tones[0], 0, { markLine: mark }),
      line("mean", tones[2], 1, { markLine: mark }),
      line("min", tones[5], 1, { ...span, data: low, stackStrategy: "all" }),
      line("max", tones[5], 1, {
        ...span,
        data: wide,
        stackStrategy: "all",
        areaStyle: { color: colour("accent-soft") },
      }),
      ...(isOdd
        ? [{ ...odd, data: history.map((row) => row.nan + row.inf), itemStyle: { color: colour("bad") } }]
        : []),
    ],
  };
}

function historyTip(row) {
  if (!row) return "";
  const numbers = COLUMNS.map((name) => [name, number(row[name])]);
  return tip(`Step ${view.data.label(row.step)}`, [...numbers, ["NaN", oddText(row.nan)], ["Inf", oddText(row.inf)]]);
}

const UNIT_BIN = 1100;

/** The limits of a bin of a histogram, nearer to zero first; as `bin_range` of core/statistics. */
function binRange(bin) {
  if (!bin) return [0, 0];
  const near = 2 ** (Math.abs(bin) - UNIT_BIN);
  return bin > 0 ? [near, 2 * near] : [-2 * near, -near];
}

function binText(bin) {
  const [low, high] = binRange(bin);
  return bin ? `${number(low, 3)} to ${number(high, 3)}` : "0";
}

/** Bars from the smallest to the largest value; each is twice as wide as the one nearer to zero. */
function histogramChart(bins) {
  const all = bins.reduce((sum, [, count]) => sum + count, 0);
  const names = bins.map(([bin]) => (bin ? number(binRange(bin)[bin > 0 ? 0 : 1], 2) : "0"));
  return {
    grid: gridAt({ left: 78, right: 26, top: 12, bottom: 28 }),
    xAxis: axis({ type: "category", data: names, splitLine: { show: false } }),
    yAxis: axis({
      type: "value",
      splitNumber: 3,
      axisLine: { show: false },
      axisLabel: { formatter: whole },
    }),
    tooltip: {
      trigger: "axis",
      ...tooltip((found) => {
        const bin = bins[found[0]?.dataIndex];
        if (!bin) return "";
        return tip(binText(bin[0]), [
          ["elements", whole(bin[1])],
          ["share", percent(bin[1] / all)],
        ]);
      }),
    },
    series: [
      {
        type: "bar",
        data: bins.map(([, count]) => count),
        barCategoryGap: "8%",
        itemStyle: { color: colour("accent-bar") },
      },
    ],
  };
}
