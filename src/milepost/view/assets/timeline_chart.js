// The chart of the timeline: metrics, sizes, phase times, and what became of each step, over one axis of steps.

const ROW_GAP = 32;
const MOST_LANES = 8;

class TimelineChart {
  constructor(host, choice) {
    this.host = host;
    this.choice = choice;
    this.zoom = { start: 0, end: 100 };
    this.chart = new Chart(host, () => this.build());
    this.chart.made = (drawing) => this.listen(drawing);
    this.chart.drew = () => this.mark();
    this.line = element("div", { class: "mark", "aria-hidden": "true" });
  }

  show() {
    this.rows = this.findRows();
    this.host.style.height = `${this.rows.reduce((all, row) => all + row.height + ROW_GAP, 0) + 66}px`;
    this.chart.draw();
    this.showLegend();
  }

  /** Move the line to the picked step. It is no part of the drawing: to draw a thousand steps again takes a while. */
  mark() {
    const { drawing } = this.chart;
    if (!drawing || !view.data.steps.length) return;
    if (this.line.parentNode !== this.host) this.host.append(this.line);
    const x = drawing.convertToPixel({ gridIndex: 0 }, [this.x(view.step), 0])[0];
    const { left, right, top } = this.place;
    const last = this.rows.at(-1);
    this.line.hidden = !(x >= left && x <= this.chart.width - right);
    this.line.style.left = `${x}px`;
    this.line.style.top = `${top}px`;
    this.line.style.height = `${this.top(this.rows.length - 1) + last.height - top}px`;
  }

  /** Where a row begins. */
  top(i) {
    return this.rows.slice(0, i).reduce((all, row) => all + row.height + ROW_GAP, this.place.top);
  }

  get place() {
    return { left: this.chart.isNarrow ? 74 : 104, right: 18, top: 28 };
  }

  zoomOut() {
    this.zoom = { start: 0, end: 100 };
    this.chart.drawing?.dispatchAction({ type: "dataZoom", ...this.zoom });
  }

  findRows() {
    const { metrics, chosen } = this.choice;
    const rows = metrics.filter((name) => chosen.has(name)).map((name) => ({ kind: "metric", name, height: 92 }));
    rows.push({ kind: "size", name: "size", height: 72 });
    if (this.phases().length)
      rows.push({ kind: "time", name: `save time, ${this.choice.phaseKind} rank`, height: 104 });
    const lanes = this.lanes();
    if (lanes.length) rows.push({ kind: "lanes", name: "what became of them", lanes, height: 22 * lanes.length });
    return rows;
  }

  /** Rows of marks: steps that are not whole and healthy, when they were verified, and the rules that keep them. */
  lanes() {
    const { steps } = view.data;
    const lanes = [];
    const add = (name, test, tone) => steps.some(test) && lanes.push({ name, test, tone });
    add("not usable", (step) => step.state !== "whole", null);
    add("verified", (step) => step.verified !== "", "good");
    const rules = new Set(steps.flatMap((step) => step.kept));
    for (const rule of [...rules].slice(0, MOST_LANES)) add(rule, (step) => step.kept.includes(rule), "c4");
    return lanes;
  }

  phases() {
    return [...new Set(view.data.steps.flatMap((step) => step.phases.map(([name]) => name)))];
  }

  x(i) {
    return this.choice.byNumber ? (view.data.steps[i].step ?? i) : i;
  }

  build() {
    const { steps } = view.data;
    const { rows } = this;
    const { isNarrow } = this.chart;
    const last = Math.max(0, steps.length - 1);
    const [low, high] = steps.length ? [this.x(0), this.x(last)] : [0, 0];
    const pad = this.choice.byNumber ? Math.max(1, (high - low) / Math.max(40, last * 2)) : 0.6;
    const { left, right } = this.place;
    const place = { left, right };
    const grids = rows.map((row, i) => gridAt({ ...place, top: this.top(i), height: row.height }));
    const title = (text, at) => ({
      text,
      left: 2,
      top: at - 25,
      textStyle: { fontSize: 12, fontWeight: 600, color: colour("soft") },
    });
    const all = rows.map((_, i) => i);
    const ticks = Math.max(2, Math.floor((this.chart.width - left) / 84));
    const xAxis = (row, i) => this.xAxis(i, { min: low - pad, max: high + pad, ticks });
    return {
      title: rows.map((row, i) => title(row.kind === "metric" ? shortened(row.name, 40) : row.name, grids[i].top)),
      grid: grids,
      xAxis: rows.map(xAxis),
      yAxis: rows.map((row, i) => this.yAxis(row, i, isNarrow)),
      axisPointer: { link: [{ xAxisIndex: "all" }], triggerTooltip: true },
      tooltip: { trigger: "axis", ...tooltip((found) => this.tip(found)) },
      dataZoom: this.zooms(all, place),
      series: rows.flatMap((row, i) => this.series(row, i)),
    };
  }

  xAxis(i, { min, max, ticks }) {
    const { byNumber } = this.choice;
    const label = (value) => {
      if (byNumber) return whole(Math.round(value));
      return Number.isInteger(value) && view.data.steps[value] ? view.data.label(value) : "";
    };
    return axis({
      type: "value",
      gridIndex: i,
      min,
      max,
      minInterval: 1,
      splitNumber: ticks,
      splitLine: { show: false },
      axisLabel: { show: i === this.rows.length - 1, formatter: label },
      axisPointer: { show: true, snap: false, label: { show: false }, lineStyle: { color: colour("faint") } },
    });
  }

  yAxis(row, i, isNarrow) {
    if (row.kind === "lanes") {
      return axis({
        type: "category",
        gridIndex: i,
        inverse: true,
        data: row.lanes.map((lane) => shortened(lane.name, 40)),
        axisLine: { show: false },
        splitLine: { show: true },
        axisLabel: { width: isNarrow ? 66 : 96, overflow: "truncate", interval: 0, hideOverlap: false },
      });
    }
    const values = row.kind === "metric" ? view.data.steps.map((step) => step.metrics.get(row.name)) : [];
    const texts = { metric: digitsFor(values), size: bytes, time: seconds };
    return axis({
      type: "value",
      gridIndex: i,
      scale: row.kind === "metric",
      splitNumber: row.height > 100 ? 4 : 3,
      min: row.kind === "metric" ? undefined : 0,
      axisLine: { show: false },
      axisLabel: { formatter: texts[row.kind] },
    });
  }

  zooms(all, place) {
    const common_ = { xAxisIndex: all, filterMode: "none", ...this.zoom };
    const plain = { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } };
    return [
      { type: "inside", ...common_, zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, preventDefaultMouseMove: false },
      {
        type: "slider",
        ...common_,
        ...place,
        bottom: 6,
        height: 18,
        borderColor: colour("line"),
        fillerColor: `${colour("accent")}22`,
        brushSelect: false,
        showDetail: false,
        handleStyle: { color: colour("card"), borderColor: colour("line-strong") },
        moveHandleStyle: { color: colour("line-strong") },
        dataBackground: plain,
        selectedDataBackground: plain,
      },
    ];
  }

  series(row, i) {
    const made = { metric: this.metricSeries, size: this.sizeSeries, time: this.timeSeries, lanes: this.laneSeries };
    const place = { xAxisIndex: i, yAxisIndex: i };
    return made[row.kind].call(this, row).map((one) => ({ ...one, ...place }));
  }

  /** What all bars have in common. Very many are drawn in one go, in one colour for each series. */
  get bar() {
    const isMany = view.data.steps.length > 300;
    return { type: "bar", barMaxWidth: 22, barMinWidth: 1, barCategoryGap: "25%", large: isMany, largeThreshold: 1 };
  }

  metricSeries(row) {
    const { steps } = view.data;
    const [tone] = palette();
    return [
      {
        type: "line",
        name: row.name,
        data: steps.map((step, k) => [this.x(k), step.metrics.get(row.name) ?? null]),
        connectNulls: true,
        showSymbol: steps.length < 60,
        symbol: "circle",
        symbolSize: 5,
        lineStyle: { width: 1.8, color: tone },
        itemStyle: { color: tone },
        sampling: steps.length > 4000 ? "lttb" : undefined,
      },
    ];
  }

  /** Bars of the sizes; the new bytes stand out where they are known. */
  sizeSeries() {
    const { data } = view;
    const fresh = data.steps.map((_, k) => data.newBytes(k));
    const bars = (name, tone, worth) => ({
      ...this.bar,
      stack: "size",
      name,
      itemStyle: { color: tone },
      data: data.steps.map((step, k) => [this.x(k), worth(step, k)]),
    });
    const states = STATES.filter((state) => data.steps.some((step) => stateOf(step) === state && step.size_bytes));
    const old = (step, k) => Math.max(0, step.size_bytes - (fresh[k] ?? 0));
    return [
      ...(data.knowsNew
        ? [bars("new bytes", colour("accent"), (step, k) => Math.min(fresh[k] ?? 0, step.size_bytes))]
        : []),
      ...states.map((state) =>
        bars(state, stateColour(state), (step, k) => (stateOf(step) === state ? old(step, k) : 0)),
      ),
    ];
  }

  timeSeries() {
    const { steps } = view.data;
    const colours = palette();
    return this.phases().map((name, p) => ({
      ...this.bar,
      stack: "time",
      name,
      itemStyle: { color: colours[p % colours.length] },
      data: steps.map((step, k) => [this.x(k), phaseOf(step, name, this.choice.phaseKind)]),
    }));
  }

  laneSeries(row) {
    const { steps } = view.data;
    const size = steps.length > 200 ? 6 : 8;
    return row.lanes.map((lane, l) => ({
      type: "scatter",
      name: lane.name,
      symbolSize: size,
      z: 5,
      data: steps.flatMap((step, k) => (lane.test(step) ? [this.laneMark(step, k, l, lane.tone)] : [])),
    }));
  }

  laneMark(step, k, l, tone) {
    const state = stateOf(step);
    if (tone) return { value: [this.x(k), l], itemStyle: { color: colour(tone) } };
    const isOpen = state === "unfinished" || state === "removed";
    const open = { color: colour("card"), borderColor: colour("soft"), borderWidth: 1.5 };
    return {
      value: [this.x(k), l],
      symbol: STATE_SIGNS[state] ?? "circle",
      symbolSize: 10,
      itemStyle: isOpen ? open : { color: stateColour(state) },
    };
  }

  nearest(value) {
    const { steps } = view.data;
    let best = 0;
    for (let i = 1; i < steps.length; i += 1)
      if (Math.abs(this.x(i) - value) < Math.abs(this.x(best) - value)) best = i;
    return best;
  }

  tip(found) {
    const first = Array.isArray(found) ? found[0] : found;
    if (!first) return "";
    const i = this.nearest(first.value[0]);
    const step = view.data.steps[i];
    const fresh = view.data.newBytes(i);
    const rows = [
      ["state", stateMark(step)],
      ["size", bytes(step.size_bytes || null)],
      fresh === null ? null : ["new bytes", bytes(fresh)],
      ...[...step.metrics].slice(0, 6).map(([name, value]) => [shortened(name, 24), number(value)]),
    ];
    if (step.phases.length) {
      const [slow] = [...step.phases].sort((a, b) => b[2] - a[2]);
      rows.push(["save", seconds(totalOf(step, "slowest"))]);
      rows.push(["longest phase", `${shortened(slow[0], 24)}, rank ${slow[3]}: ${seconds(slow[2])}`]);
    }
    if (step.kept.length) rows.push(["kept because", shortened(step.kept.join(", "), 60)]);
    if (step.verified) rows.push(["verified", verifiedText(step)]);
    return tip(`Step ${view.data.label(i)}`, rows.filter(Boolean));
  }

  listen(drawing) {
    drawing.on("datazoom", () => {
      const [{ start, end }] = drawing.getOption().dataZoom;
      this.zoom = { start, end };
      this.mark();
    });
    drawing.getZr().on("click", (event) => {
      const at = [event.offsetX, event.offsetY];
      const i = this.rows.findIndex((_, row) => drawing.containPixel({ gridIndex: row }, at));
      if (i >= 0) pickStep(this.nearest(drawing.convertFromPixel({ gridIndex: i }, at)[0]));
    });
  }

  showLegend() {
    const { data } = view;
    const colours = palette();
    const phases = this.phases().slice(0, 24);
    const parts = phases.map((name, p) => legendEntry(swatch(colours[p % colours.length]), shortened(name, 30)));
    const fresh = data.isIncremental ? "new bytes" : "new bytes, where compared";
    if (data.knowsNew) parts.unshift(legendEntry(swatch(colour("accent")), fresh));
    const states = new Set(data.steps.map(stateOf));
    states.delete("whole");
    for (const state of states) parts.push(element("span", { class: `state ${state}` }, state));
    byId("timeline-legend").replaceChildren(...parts);
  }
}
