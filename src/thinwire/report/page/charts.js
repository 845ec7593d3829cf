"use strict";
// Texts and charts, for the other scripts. Names come from files of anybody: they are only ever set as text, never as HTML.
const thinwire = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#4878cf", "#e07b39", "#3f9b63", "#cc4c56", "#8a6fc4", "#94714f", "#cf6fae", "#858d94", "#b29a2e"];
  const DASHES = [[], [8, 4], [2, 4], [10, 4, 2, 4]];
  const HEIGHT = 240;
  const LEAST_WIDTH = 240;
  const labels = [...new Set(data.runs.map((run) => run.label))];
  let charts = [];

  const colour = (label) => COLOURS[labels.indexOf(label) % COLOURS.length];
  const dash = (label) => DASHES[Math.floor(labels.indexOf(label) / COLOURS.length) % DASHES.length];
  const words = (run) => run.label + ", seed " + run.seed;

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const note = (text) => element("p", { className: "note", textContent: text });
  const heading = (text) => element("h2", { textContent: text });
  const digits = (value, count) => Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });
  const compact = (value) => value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
  const dashed = (value, show) => (value === null || value === undefined ? "–" : show(value));

  function size(bytes) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (bytes < 1000) return (unit === "B" ? bytes.toFixed(0) : bytes.toFixed(1)) + " " + unit;
      bytes /= 1000;
    }
    return bytes.toFixed(1) + " TB";
  }

  const duration = (s) => (s < 1e-3 ? digits(1e6 * s, 3) + " µs" : s < 1 ? digits(1e3 * s, 3) + " ms" : digits(s, 3) + " s");

  function figure(metric, value) {
    if (value === null) return "–";
    if (metric === "accuracy") return (100 * value).toFixed(2) + " %";
    return metric === "perplexity" ? value.toFixed(2) : digits(value, 4);
  }

  // A metric, and what it was measured on where that is the same for all.
  function measured(metric, runs) {
    const on = new Set(runs.map((run) => run.examples));
    return on.size === 1 ? `${metric} on ${[...on][0]}` : metric;
  }

  // As on an axis: no more digits than are needed.
  const short = (metric) => (value) => (metric === "accuracy" ? digits(100 * value, 5) + " %" : digits(value, 4));

  function swatch(of, block = false) {
    const made = element("span", { className: block ? "swatch block" : "swatch" });
    made.style[block ? "background" : "borderTopColor"] = of;
    return made;
  }

  function legend(names) {
    return element("ul", { className: "legend" }, ...names.map((label) => {
      const line = swatch(colour(label));
      if (dash(label).length) line.style.borderTopStyle = "dashed";
      return element("li", {}, line, label);
    }));
  }

  function spreads(values, ratio = 20) {
    const known = values.filter((value) => value !== null && value !== undefined);
    const least = known.reduce((a, b) => Math.min(a, b), Infinity);
    return known.length > 1 && least > 0 && known.reduce((a, b) => Math.max(a, b)) > ratio * least;
  }

  // Charts.

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Of a logarithmic axis only powers of ten, or 1, 2 and 5 of each where it is short: all would overlap.
  function fewer(values) {
    const known = values.filter((value) => value !== null);
    const first = known.length && Math.max(...known) / Math.min(...known) < 100 ? [1, 2, 5] : [1];
    return values.map((value) => (value !== null && first.includes(Number(value.toExponential(3).split("e")[0])) ? value : null));
  }

  // The next smaller 1, 2 or 5 times a power of ten: marks of a logarithmic axis are counted from its beginning.
  function below(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [5, 2, 1].find((first) => first * power <= value * 1.0001);
  }

  function axis(show, logarithmic) {
    const filter = (chart, values) => (logarithmic ? fewer(values) : values);
    const line = { stroke: css("--line"), width: 1, filter };
    const values = (chart, ticks) => ticks.map((value) => (value === null ? "" : show(value)));
    return { values, filter, stroke: css("--soft"), font: "12px system-ui, sans-serif", grid: line, ticks: line };
  }

  const axes = (x, y) => [{ ...axis(x.show, x.log), size: 32, space: 60 }, { ...axis(y.show, y.log), size: 76 }];

  // `series` are { name, look }, `tables` their [xs, ys]; `x` and `y` say how values are shown.
  function draw(parent, title, series, tables, x, y) {
    if (!tables.some((table) => table[0].length)) return;
    const options = {
      scales: { x: { time: false, distr: x.log ? 3 : 1, range: x.range }, y: { distr: y.log ? 3 : 1, range: y.range } },
      axes: axes(x, y),
      series: [{}, ...series.map((one, i) => ({
        width: 1.6, spanGaps: true, points: { show: tables[i][0].length < 3 }, ...one.look, label: "",
      }))],
    };
    place(parent, title, options, uPlot.join(tables), (chart) => underCursor(chart, series, x, y));
  }

  // A chart, and below it a line on what the mouse points at.
  function place(parent, title, options, values, describe, height = HEIGHT) {
    const readout = element("p", { className: "readout note" });
    const inside = element("div");
    parent.append(element("div", { className: "chart" }, title ? element("h3", { textContent: title }) : null, inside, readout));
    const usual = { width: LEAST_WIDTH, height, legend: { show: false }, cursor: { points: { size: 7 } } };
    const hooks = { ...options.hooks, setCursor: [(chart) => { readout.textContent = describe(chart); }] };
    charts.push({ chart: new uPlot({ ...usual, ...options, hooks }, values, inside), inside, height });
  }

  // The nearest curve under the mouse, in words.
  function underCursor(chart, series, x, y) {
    const { idx, top } = chart.cursor;
    if (idx === null || idx === undefined) return "";
    let best = null;
    for (let i = 1; i < chart.data.length; i++) {
      let at = idx;
      while (at > 0 && (chart.data[i][at] === null || chart.data[i][at] === undefined)) at--;
      const value = chart.data[i][at];
      if (value === null || value === undefined) continue;
      const apart = Math.abs(chart.valToPos(value, "y") - top);
      if (best === null || apart < best.apart) best = { apart, text: `${series[i - 1].name}: ${y.show(value)} at ${x.full(chart.data[0][at])}` };
    }
    return best ? best.text : "";
  }

  // When all are in their places: a column is narrower with others beside it.
  function fit() {
    charts.forEach((one) => {
      const width = Math.max(LEAST_WIDTH, one.inside.clientWidth);
      if (one.chart) one.chart.setSize({ width, height: one.height });
      else one.paint(width);
    });
  }

  // What is not of uPlot: `paint` is called with the width there is.
  const keep = (inside, paint) => charts.push({ inside, paint });

  function forget() {
    charts.forEach(({ chart }) => chart && chart.destroy());
    charts = [];
  }

  return {
    COLOURS, axes, below, colour, compact, css, dash, dashed, data, digits, draw, duration, element, figure, fit, forget, heading,
    keep, labels, legend, measured, note, place, short, size, spreads, swatch, words,
  };
})();
