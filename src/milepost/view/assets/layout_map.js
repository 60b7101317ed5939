// The drawing of the layout map: boxes with their ranks, ticks where the tensor is cut, and the boxes of another mesh.

/** Where the axis of a dimension has ticks: at the cuts where they are few, else at round numbers. */
function ticksOf(length, cuts, most) {
  const near = length / (most * 1.6);
  const apart = (ticks) => ticks.filter((tick) => tick === 0 || tick === length || length - tick > near);
  const inside = [...new Set([0, ...cuts, length])].sort((a, b) => a - b);
  if (inside.length <= most) return apart(inside);
  const rough = length / (most - 2);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((n) => n * unit >= rough);
  return apart([...Array.from({ length: Math.ceil(length / step) }, (_, i) => i * step), length]);
}

function layoutMap(panel) {
  const { tensor, drawn } = panel;
  const [down, across] = panel.axes;
  const [, width, , height] = panel.sides(wholeBox(tensor.shape));
  const isFlat = down === undefined;
  const side = (d, about, most) => {
    const length = Math.max(1, d === 0 || d ? tensor.shape[d] : 1);
    const cuts = d === undefined ? [] : drawn.map(({ box }) => box.offset[d]);
    const ticks = ticksOf(length, cuts.slice(0, 4000), most);
    return axis({
      type: "value",
      min: 0,
      max: length,
      splitLine: { show: false },
      name: d === undefined ? "" : `dim ${d}`,
      nameLocation: "middle",
      axisTick: { show: true, customValues: ticks, lineStyle: { color: colour("line-strong") } },
      axisLabel: { customValues: ticks, formatter: (n) => whole(n) },
      ...about,
    });
  };
  const acrossMost = panel.chart.isNarrow ? 5 : MOST_TICKS;
  const zoom = { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, filterMode: "none" };
  return {
    grid: gridAt({ left: isFlat ? 12 : 84, right: 24, top: 44, bottom: 12 }),
    xAxis: side(across, { position: "top", nameGap: 24, max: Math.max(1, width) }, acrossMost),
    yAxis: side(down, { inverse: true, show: !isFlat, nameGap: 62, max: Math.max(1, height) }, MOST_TICKS),
    tooltip: { ...tooltip((found) => boxTip(panel.rows[found.data?.row])) },
    dataZoom: [
      { ...zoom, xAxisIndex: 0 },
      { ...zoom, yAxisIndex: 0 },
    ],
    series: [boxSeries(panel), ...overlaySeries(panel)],
  };
}

function boxTip(row) {
  if (!row) return "";
  return tip(`Rank ${row.rank}`, [
    ["box", boxText(row.box)],
    ["size", bytes(row.bytes)],
    ["file", shortened(row.file, 80)],
    ["held by", `rank ${rankText(row.holders)}`],
  ]);
}

/** A box in pixels. */
function rectOf(api) {
  const [x, y] = api.coord([api.value(0), api.value(2)]);
  const [right, bottom] = api.coord([api.value(1), api.value(3)]);
  return { x, y, width: Math.max(0.5, right - x), height: Math.max(0.5, bottom - y) };
}

function boxSeries(panel) {
  const { drawn } = panel; // it may be drawn once more after another tensor was picked
  const [card, strong] = [colour("card"), colour("text")];
  const tones = new Map(panel.writers.map((rank) => [rank, panel.colourOf(rank)]));
  return {
    type: "custom",
    clip: true,
    progressive: 0,
    data: drawn.map((row) => ({ value: panel.sides(row.box), row: row.number })),
    renderItem: (params, api) => {
      const row = drawn[params.dataIndex];
      const rect = rectOf(api);
      const isMarked = row.number === panel.marked;
      const gap = rect.width > 4 && rect.height > 4 ? 1 : 0;
      const style = { fill: tones.get(row.rank), stroke: isMarked ? strong : card, lineWidth: isMarked ? 3 : gap };
      const box = { type: "rect", shape: rect, z2: isMarked ? 5 : 1, style };
      return { type: "group", children: [box, ...rankLabel(row.rank, rect, tones.get(row.rank))] };
    },
  };
}

function rankLabel(rank, rect, fill) {
  const text = String(rank);
  if (rect.width <= 7 * text.length + 8 || rect.height <= 14) return [];
  const isRoomy = rect.width > 62 && rect.height > 16;
  const style = {
    text: isRoomy ? `rank ${text}` : text,
    x: rect.x + rect.width / 2,
    y: rect.y + rect.height / 2,
    align: "center",
    verticalAlign: "middle",
    fill: fill.startsWith("#") ? inkOn(fill) : colour("text"),
    fontSize: 11,
  };
  return [{ type: "text", z2: 6, silent: true, style }];
}

/** The boxes of the ranks of another mesh, dashed; those of the picked rank in full. */
function overlaySeries(panel) {
  const boxes = reads.overlay();
  if (!boxes.length) return [];
  const stroke = colour("text");
  return [
    {
      type: "custom",
      clip: true,
      silent: true,
      z: 10,
      data: boxes.map(({ box }) => panel.sides(box)),
      renderItem: (params, api) => {
        const { isChosen } = boxes[params.dataIndex];
        const { x, y, width, height } = rectOf(api);
        const shape = { x: x + 1, y: y + 1, width: Math.max(0.5, width - 2), height: Math.max(0.5, height - 2) };
        const line = isChosen ? { lineWidth: 3 } : { lineWidth: 1.2, lineDash: [5, 4] };
        return { type: "rect", shape, style: { fill: isChosen ? `${stroke}26` : "none", stroke, ...line } };
      },
    },
  ];
}
