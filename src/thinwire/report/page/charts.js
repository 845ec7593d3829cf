"use strict";
// Texts and charts, for page.js. Names come from files of anybody: they are only ever set as text, never as HTML.
const thinwire = (() => {
  const HEIGHT = 240;
  const LEAST_WIDTH = 240;
  let charts = [];

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children.filter((child) => child !== null));
    return made;
  }

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

  function figure(metric, value) {
    if (value === null) return "–";
    if (metric === "accuracy") return (100 * value).toFixed(2) + " %";
    return metric === "perplexity" ? value.toFixed(2) : digits(value, 4);
  }

  function swatch(of, block = false) {
    const made = element("span", { className: block ? "swatch block" : "swatch" });
    made.style[block ? "background" : "borderTopColor"] = of;
    return made;
  }

  // Charts.

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Of a logarithmic axis only powers of ten, or 1, 2 and 5 of each where it is short: all would overlap.
  function fewer(values) {
    const known = values.filter((value) => value !== null);
    const first = known.length && Math.max(...known) / Math.min(...known) < 100 ? [1, 2, 5] : [1];
    return values.map((value) => (value !== null && first.includes(Number(value.toExponential(3).split("e")[0])) ? value : null));
  }

  function axis(show, logarithmic) {
    const filter = (chart, values) => (logarithmic ? fewer(values) : values);
    const line = { stroke: css("--line"), width: 1, filter };
    const values = (chart, ticks) => ticks.map((value) => (value === null ? "" : show(value)));
    return { values, filter, stroke: css("--soft"), font: "12px system-ui, sans-serif", grid: line, ticks: line };
  }

  // `series` are { name, look }, `tables` their [xs, ys]; `x` and `y` say how values are shown.
  function draw(parent, title, series, tables, x, y) {
    if (!tables.some((table) => table[0].length)) return;
    const readout = element("p", { className: "readout note" });
    const place = element("div");
    parent.append(element("div", { className: "chart" }, element("h3", { textContent: title }), place, readout));
    const options = {
      width: LEAST_WIDTH,
      height: HEIGHT,
      scales: { x: { time: false, distr: x.log ? 3 : 1, range: x.range }, y: { distr: y.log ? 3 : 1 } },
      axes: [{ ...axis(x.show, x.log), size: 32, space: 60 }, { ...axis(y.show, y.log), size: 62 }],
      series: [{}, ...series.map((one, i) => ({
        width: 1.6, spanGaps: true, points: { show: tables[i][0].length < 3 }, ...one.look, label: "",
      }))],
      legend: { show: false },
      cursor: { points: { size: 7 } },
      hooks: { setCursor: [(chart) => { readout.textContent = underCursor(chart, series, x, y); }] },
    };
    charts.push({ chart: new uPlot(options, uPlot.join(tables), place), place });
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
    charts.forEach(({ chart, place }) => chart.setSize({ width: Math.max(LEAST_WIDTH, place.clientWidth), height: HEIGHT }));
  }

  function forget() {
    charts.forEach(({ chart }) => chart.destroy());
    charts = [];
  }

  return { compact, dashed, digits, draw, element, figure, fit, forget, size, swatch };
})();
