// Draws one chart with uPlot: lines over steps, or seconds stacked. Charts share the step under the pointer and the zoom.

const charts = new Set();
const STEP_INCREMENTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 190;
let zoom = null;
let smoothing = 0;
let stepRange = [0, 1];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => css(`--c${i % 8}`);

// Exponential moving average that starts without bias; null stays null.
function smoothed(values) {
  if (!smoothing) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

// Of an evaluation, or few values, or with gaps between them: they are marked, and joined over the gaps.
function isSparse({ name, values }) {
  const present = values.flatMap((v, i) => (v === null ? [] : [i]));
  return name.startsWith("eval/") || present.length < 4 || present.length < 0.6 * (present.at(-1) - present[0] + 1);
}

// Whether most points of a line lie on another, which it would hide if it were not dashed.
function covers(values, other) {
  const both = values.flatMap((v, i) => (v === null || other[i] === null ? [] : [v === other[i]]));
  return both.filter(Boolean).length > both.length / 2;
}

// The columns of uPlot: one list of steps of all series, and the values of each series at these steps.
function aligned(series) {
  const steps = [...new Set(series.flatMap((s) => s.steps.filter((_, i) => s.values[i] !== null)))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const columns = series.map((s) => {
    const values = new Array(steps.length).fill(null);
    s.steps.forEach((step, i) => { if (s.values[i] !== null) values[place.get(step)] = s.values[i]; });
    return values;
  });
  return [steps, columns];
}

// A figure with a chart. `spec()` gives { series: [{label, name, steps, values, colour, dash}], stacked, log } anew.
class Chart {
  constructor(title, unit, spec, { onStep, note } = {}) {
    Object.assign(this, { spec, onStep, hidden: new Set(), log: false, plot: null, visible: false });
    this.legend = el("div", { class: "legend" });
    this.host = el("div", { class: "plot" });
    this.remark = el("p", { class: "remark", hidden: true });
    const heading = el("figcaption", { title: note }, el("b", {}, title), " ", el("span", { class: "unit" }, unit));
    if (spec().log) heading.append(this.logButton());
    this.figure = el("figure", { class: "chart" }, heading, this.host, this.legend, this.remark);
    charts.add(this);
    this.watcher = new IntersectionObserver((entries) => {
      if (!entries.some((e) => e.isIntersecting) || this.visible) return;
      this.visible = true;
      this.draw();
    }, { rootMargin: "300px" });
    this.watcher.observe(this.figure);
    this.sizer = new ResizeObserver(() => {
      const width = this.host.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    });
    this.sizer.observe(this.host);
    this.read();
  }

  // The legend is there before the chart is drawn, so that nothing moves when it is.
  read() {
    const spec = this.spec();
    [this.steps, this.raw] = aligned(spec.series);
    this.series = spec.series;
    if (!spec.stacked) {
      this.raw.forEach((values, i) => {
        const covered = this.raw.slice(0, i).filter((other) => covers(values, other)).length;
        if (!this.series[i].dash.length) this.series[i].dash = DASHES[covered % DASHES.length];
      });
    }
    this.drawLegend(null);
    this.showRemark(spec);
    return spec;
  }

  logButton() {
    return button({
      class: "small", "aria-pressed": "false",
      onclick: (event) => {
        this.log = !this.log;
        event.currentTarget.setAttribute("aria-pressed", String(this.log));
        this.draw();
      },
    }, "log");
  }

  draw() {
    const spec = this.read();
    if (!this.visible) return;
    const { steps, raw: columns } = this;
    const log = this.log && spec.log;
    const shown = spec.series.map((s) => !this.hidden.has(s.label));
    const lines = spec.stacked ? stackedLines(columns, spec.series, shown) : plainLines(columns, spec.series, shown, log);
    const shape = JSON.stringify([log, lines.map((line) => line.options)]);
    if (this.plot && shape === this.shape) { // only the values are new: the pointer and the picture stay
      this.plot.setData([steps, ...lines.map((l) => l.values)]);
      return;
    }
    this.shape = shape;
    this.destroyPlot();
    this.plot = new uPlot(this.options(lines, log, spec.stacked), [steps, ...lines.map((l) => l.values)], this.host);
    this.plot.over.addEventListener("click", (event) => this.clicked(event));
    this.plot.over.addEventListener("dblclick", () => setZoom(null));
  }

  options(lines, log, stacked) {
    const ink = css("--muted"), grid = css("--grid");
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: ink, font, ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    return {
      width: this.host.clientWidth || 320, height: HEIGHT, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: {
        sync: { key: "steps", setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false,
      },
      select: { show: true },
      scales: {
        x: { time: false, range: () => zoom || stepRange },
        y: log ? { distr: 3 } : { range: (u, low, high) => valueRange(low, high, stacked) },
      },
      axes: [
        { ...axis, incrs: STEP_INCREMENTS, size: 24, label: "step", labelFont: font, labelSize: 14, labelGap: -2, grid: { show: false }, values: (u, ticks) => ticks.map((t) => t.toLocaleString("en")) },
        { ...axis, size: 52, values: (u, ticks) => ticks.map((t) => (t === null ? "" : short(t, 3))) },
      ],
      series: [{}, ...lines.map((line) => line.options)],
      hooks: {
        setCursor: [(u) => this.drawLegend(u.cursor.idx ?? null)],
        setSelect: [(u) => {
          if (u.select.width < 8) return;
          const ends = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.dragged = true;
          setZoom(ends);
        }],
      },
    };
  }

  clicked(event) {
    const index = this.plot.cursor.idx ?? null;
    const dragged = this.dragged;
    this.dragged = false;
    if (!dragged && event.pointerType !== "touch" && index !== null) this.onStep?.(this.steps[index]);
  }

  // The values at the step under the pointer; without one, the last value of each series.
  drawLegend(index) {
    if (!this.series) return;
    const at = index === null ? "last" : `step ${this.steps[index].toLocaleString("en")}`;
    if (this.legend.childElementCount !== this.series.length + 1) {
      this.legend.replaceChildren(el("span", { class: "at" }), ...this.series.map((s) => this.legendEntry(s)));
    }
    this.legend.firstChild.textContent = at;
    this.series.forEach((s, i) => {
      const value = index === null ? this.raw[i].findLast((v) => v !== null) : this.raw[i][index];
      this.legend.children[i + 1].lastChild.textContent = short(value ?? null);
    });
  }

  legendEntry(series) {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = series.dash?.length ? `repeating-linear-gradient(90deg, ${series.colour} 0 4px, transparent 4px 6px)` : series.colour;
    return button({
      "aria-pressed": "true", title: `${series.name}: hide or show`,
      onclick: (event) => {
        if (!this.hidden.delete(series.label)) this.hidden.add(series.label);
        event.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(series.label)));
        this.draw();
      },
    }, swatch, el("span", { class: "label" }, series.label), el("span", { class: "number" }));
  }

  showRemark(spec) {
    const gaps = spec.series.flatMap((s) => (s.nonFinite?.length
      ? [`${s.name} is not finite at ${s.nonFinite.length > 5 ? `${s.nonFinite.length} steps` : `step ${s.nonFinite.join(", ")}`}`] : []));
    this.remark.hidden = !gaps.length;
    this.remark.textContent = gaps.join("; ");
  }

  restyle() {
    this.shape = null;
    this.legend.replaceChildren();
    this.draw();
  }

  destroyPlot() {
    this.plot?.destroy();
    this.plot = null;
  }

  destroy() {
    this.destroyPlot();
    this.watcher.disconnect();
    this.sizer.disconnect();
    charts.delete(this);
  }
}

function plainLines(columns, series, shown, log) {
  const lines = [];
  series.forEach((s, i) => {
    const values = log ? columns[i].map((v) => (v !== null && v > 0 ? v : null)) : columns[i];
    const sparse = isSparse(s);
    const base = { show: shown[i], stroke: s.colour, dash: s.dash, spanGaps: sparse };
    const points = { show: sparse, size: 5, fill: s.colour };
    if (smoothing && !sparse) {
      lines.push({ values, options: { ...base, alpha: 0.25, width: 1, points: { show: false } } });
      lines.push({ values: smoothed(values), options: { ...base, width: 1.8, points: { show: false } } });
    } else {
      lines.push({ values, options: { ...base, width: 1.5, points } });
    }
  });
  return lines;
}

// Areas on top of one another: the sum of the shown series up to each, the largest drawn first.
function stackedLines(columns, series, shown) {
  let below = columns.length ? columns[0].map(() => 0) : [];
  const lines = series.map((s, i) => {
    if (shown[i]) below = below.map((sum, k) => sum + (columns[i][k] ?? 0));
    return { values: below, options: { show: shown[i], stroke: s.colour, fill: s.colour, width: 0.5, points: { show: false } } };
  });
  return lines.reverse();
}

function valueRange(low, high, stacked) {
  if (low === null || high === null) return [0, 1];
  if (stacked) return [0, high * 1.05 || 1];
  const span = high - low || Math.abs(high) || 1;
  const bottom = low >= 0 && low < 0.6 * high ? 0 : low - 0.06 * span;
  return [low === 0 && high === 0 ? 0 : bottom, high + 0.06 * span];
}

function setZoom(ends) {
  zoom = ends;
  const [min, max] = zoom || stepRange;
  for (const { plot } of charts) {
    plot?.redraw(false, true);
    plot?.setScale("x", { min, max });
  }
  const button = $("reset-zoom");
  if (button) button.hidden = zoom === null;
}

function redrawCharts() {
  for (const chart of charts) chart.draw();
}
